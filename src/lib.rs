//! hotpin: Mixture-of-Experts models larger than RAM, with the hot experts kept locked by a
//! controller that watches routing, faults and memory pressure.
#![deny(unsafe_code)]

#[cfg(all(test, feature = "loom"))]
extern crate self as hotpin;

pub mod bench;
pub mod cli;
pub mod config;
pub mod demo;
pub mod doctor;
#[allow(unsafe_code)]
pub mod engine;
mod files;
pub mod generate;
pub mod governor;
pub mod learn;
pub mod model;
pub mod outlook;
pub mod plant;
pub mod profile;
mod rng;
pub mod sensors;
pub mod server;
pub mod size;
#[allow(unsafe_code)]
pub mod store;
mod sync;
mod time;
pub mod top;
pub mod trace;
pub mod workload;

// A part of the library's own tests, since a test of its own would build the program with the feature.
#[cfg(all(test, feature = "loom"))]
#[allow(unsafe_code)]
#[path = "../tests/loom/mod.rs"]
mod orders;
