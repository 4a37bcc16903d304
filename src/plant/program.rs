//! The program that regulates is kept in memory itself.

use crate::sensors::{Roots, Sensors};
use crate::size::format_bytes;
use crate::store::program;
use hotpin_controllers::{Moment, PolicyKind};

/// Keeps the program's own pages where a policy is to regulate, as far as they are few beside what may be locked
/// and what the machine has: whoever gives memory back must not wait for the disk to read how. To be called
/// before a model is mapped. The log says what came of it.
pub fn keep_program(policy: PolicyKind) {
    if policy == PolicyKind::Off {
        return;
    }
    let now = Moment::default();
    let sample = Sensors::open(&Roots::default(), now).sample(now);
    let limits = [sample.locks.memlock_bytes(), sample.usable_bytes(0, 0)];
    match program::keep(limits.into_iter().flatten().min()) {
        Ok(bytes) => tracing::debug!(
            "the program's own {} are kept in memory",
            format_bytes(bytes)
        ),
        Err(error) => tracing::info!("the program's own pages are left to the kernel: {error}"),
    }
}
