//! Runs Mixture-of-Experts models larger than RAM.
pub mod demo;
pub mod engine;
