//! The running engine as the governor sees it: routing counters that are read without stopping it,
//! and the feeder that brings each layer's routed experts from the store.

mod counters;
mod feeder;
mod fixed;
mod parked;
mod rig;
mod vram;

pub use counters::{Counters, Totals};
pub use feeder::Feeder;
pub use fixed::PoolUse;
pub use parked::{Parked, Resumed};
pub use rig::{Rig, RigError, RigOptions, VramOptions};
pub use vram::{
    Move, Moved, Outcome, Published, VramFeed, VramLink, VramSize, check_placed, dense_on_device,
    pool_layout,
};
