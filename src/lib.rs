//! x
pub mod sensors;
