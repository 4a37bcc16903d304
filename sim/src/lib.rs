//! Offline plant and trace replay for hotpin's controllers.
//!
//! Two tools that share no state: [`replay`] runs cache policies over a recorded routing trace, and
//! [`plant`] closes the loop around a real [`hotpin_controllers::Policy`] in virtual time. Nothing
//! here reads a clock or the machine, and equal seeds give equal reports.
#![forbid(unsafe_code)]

pub mod capacity;
pub mod import;
pub mod plant;
pub mod replay;
pub mod rng;
pub mod scenarios;
pub mod sweep;
pub mod whatif;
