//! Control laws against a small scripted plant.

mod baselines;
mod inputs;
mod plant;
mod properties;
mod reconfigure;
mod scenarios;
mod vram;
