//! hotpin: Mixture-of-Experts models larger than RAM, with the hot experts kept locked by a
//! controller that watches routing, faults and memory pressure.

pub mod engine;
