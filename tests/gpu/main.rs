//! Tests of the tier in a graphics device's memory, on a toy model and whatever device Vulkan gives: Mesa's
//! software device is enough. A binary of its own, since it is built with the feature `vulkan`, which
//! takes llama.cpp minutes, and because the device has to be named before the process begins.

mod chosen;
#[path = "../it/client.rs"]
#[allow(dead_code, reason = "what misbehaves is for the other tests")]
mod client;
mod hog;
#[path = "../it/in_process.rs"]
mod in_process;
mod moves;
mod placed;
mod pool;
#[path = "../it/program.rs"]
#[allow(dead_code, reason = "models are for the other tests")]
mod program;
mod rigged;
mod served;
mod support;
