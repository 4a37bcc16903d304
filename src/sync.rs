//! Atomics and locks of what the engine's thread, the governor's and the server's share.
//!
//! In a build with feature `loom` they are those of the model checker, which takes `tests/loom` through the
//! orders in which threads may go on; nothing else works in such a build.

#[cfg(feature = "loom")]
pub(crate) use loom::sync::{Mutex, MutexGuard, atomic};
#[cfg(not(feature = "loom"))]
pub(crate) use std::sync::{Mutex, MutexGuard, atomic};
