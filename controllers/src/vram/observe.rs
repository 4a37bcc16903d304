//! What the law is told each tick. A sensor that is absent or failed is `None`, never 0.

use super::curve::MissCurve;
use super::decision::Arrangement;
use super::pool::PoolTotals;
use crate::ids::Moment;
use serde::{Deserialize, Serialize};

/// Classes of batch width: 1, 2, 3 to 4, 5 to 8, 9 to 16, 17 to 32 tokens, and more.
pub const WIDTHS: usize = 7;

/// The class of a batch of so many tokens.
#[must_use]
pub fn width_class(tokens: u32) -> usize {
    let class = tokens.max(1).next_power_of_two().trailing_zeros() as usize;
    class.min(WIDTHS - 1)
}

/// Running totals of decode calls of one class of width.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepTotals {
    /// Calls.
    pub steps: u64,
    /// Their tokens.
    pub tokens: u64,
    /// Their time, ns.
    pub ns: u64,
    /// Bytes of the distinct experts that they selected, layer by layer.
    pub routed_bytes: u64,
    /// Bytes that the pool uploaded for them.
    pub upload_bytes: u64,
    /// Of `routed_bytes`, those of batches that passed the pool over.
    pub bypassed_bytes: u64,
}

/// What the tracker knows.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct VramFigures {
    /// The arrangement that is tracked.
    pub arrangement: Arrangement,
    /// The pool's totals since its context was made; all 0 without a pool.
    pub pool: PoolTotals,
    /// Decode calls since the tracker was made, by class of width. Those of a context's first calls,
    /// in which it warms up, are left out.
    pub steps: [StepTotals; WIDTHS],
    /// What pools of other sizes would do.
    pub curve: MissCurve,
}

/// Memory of one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceMemory {
    /// All of it, bytes.
    pub total_bytes: u64,
    /// What anybody could still allocate, bytes. What we hold has left it.
    pub free_bytes: u64,
}

/// What changes cost, as last measured, and the memory that they need.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangeCosts {
    /// Making a context anew, sequences saved and restored, ns.
    pub recreate_ns: Option<u64>,
    /// Loading the model anew, with its context, ns.
    pub reload_ns: Option<u64>,
    /// Device bytes of a context besides its pool (KV cache, compute buffers), of all devices.
    pub context_bytes: Option<u64>,
    /// Device bytes of the weights besides experts, of all devices.
    pub dense_bytes: Option<u64>,
    /// Host bytes that the saved sequences take meanwhile.
    pub state_bytes: Option<u64>,
}

/// One tick's view.
#[derive(Clone, Copy, Debug)]
pub struct VramObservation<'a> {
    /// When the sensors were read.
    pub now: Moment,
    /// Memory by device, in the order of the layout's devices; `None` where it cannot be read.
    pub devices: &'a [Option<DeviceMemory>],
    /// The tracker's figures; `None` when routing is not seen.
    pub figures: Option<&'a VramFigures>,
    /// What the engine has now.
    pub applied: Arrangement,
    /// Bandwidth from host memory to the device, bytes per second, where it was measured. What the
    /// engine's own uploads show takes its place as soon as it is known.
    pub link_bytes_per_s: Option<f64>,
    /// What changes cost.
    pub costs: ChangeCosts,
    /// Host memory that can be had, bytes.
    pub host_available_bytes: Option<u64>,
    /// A change that was tried since the last tick and did not work; the engine has what `applied`
    /// says.
    pub failed: Option<Arrangement>,
    /// No request is being served.
    pub idle: bool,
}
