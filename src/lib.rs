//! x

pub mod model;
pub mod size;
