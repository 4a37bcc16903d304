//! Where expert bytes live.

pub mod residency;
