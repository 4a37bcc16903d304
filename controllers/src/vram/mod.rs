//! VRAM as a tier for experts: what llama.cpp's expert pool does, what it would do at other sizes, and
//! which size and arrangement are worth having.
//!
//! The pool itself is llama.cpp's: fixed when a context is made, silent until it is freed. A
//! [`Tracker`] replays it beside the engine, call by call, and keeps its miss-ratio curve; a
//! [`VramLaw`] turns what the tracker and the sensors say into an [`Arrangement`]. Two threads may own
//! the two: all that passes between them is [`VramFigures`].

mod choice;
mod curve;
mod decision;
mod law;
mod layout;
mod mean;
mod memory;
mod observe;
mod pace;
mod pool;
mod slru;
mod times;
mod tracker;

pub use curve::{CurvePoint, MissCurve};
pub use decision::{
    Arrangement, Change, ChangeKind, Expected, VramCeiling, VramDecision, VramRule,
};
pub use law::VramLaw;
pub use layout::{
    DeviceLayout, GroupPlan, LayerLayout, LayoutError, PoolLayout, PoolPlan, TensorLayout,
};
pub use observe::{
    ChangeCosts, DeviceMemory, StepTotals, VramFigures, VramObservation, WIDTHS, width_class,
};
pub use pool::{Bypasses, Copied, MOST_POOLED_TOKENS, Pool, PoolCounts, PoolTotals, Routed};
pub use tracker::Tracker;
