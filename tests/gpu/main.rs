//! Tests of the tier in a graphics device's memory, on a toy model and whatever device Vulkan gives: Mesa's
//! software device is enough. A binary of its own, since it is built with the feature `vulkan`, which
//! takes llama.cpp minutes, and because the device has to be named before the process begins.

mod hog;
mod moves;
mod placed;
mod pool;
mod support;
