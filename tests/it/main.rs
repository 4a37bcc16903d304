//! x

mod sensors;
