//! x
pub mod bench;
pub mod size;
pub mod store;
