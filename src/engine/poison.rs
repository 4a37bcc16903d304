//! The flag that stops a decode whose expert bytes could not be had.
//!
//! Returning `false` from the tap only ends the tap's own loop: `llama_decode` still reports
//! success. So a failure is written here, the abort callback reads it before every node, and the
//! session checks it after every decode, before anything is sampled.

use crate::sync::Mutex;
use crate::sync::atomic::{AtomicBool, Ordering};

/// Set once by the first failure, cleared by the session when it reports it.
#[derive(Debug, Default)]
pub struct Poison {
    set: AtomicBool,
    cause: Mutex<Option<String>>,
}

impl Poison {
    /// Records a failure; the first cause is the one that is reported.
    pub fn set(&self, cause: String) {
        let mut slot = self
            .cause
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        slot.get_or_insert(cause);
        self.set.store(true, Ordering::Release);
    }

    /// Whether a failure was recorded.
    #[must_use]
    pub fn is_set(&self) -> bool {
        self.set.load(Ordering::Acquire)
    }

    /// Takes the recorded cause and clears the flag.
    pub fn take(&self) -> Option<String> {
        if !self.is_set() {
            return None;
        }
        let mut slot = self
            .cause
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        self.set.store(false, Ordering::Release);
        slot.take()
    }
}

#[cfg(test)]
mod tests {
    use super::Poison;

    #[test]
    fn first_cause_wins_and_is_taken_once() {
        let poison = Poison::default();
        assert!(!poison.is_set());
        assert_eq!(poison.take(), None);
        poison.set("read failed".into());
        poison.set("later".into());
        assert!(poison.is_set());
        assert_eq!(poison.take().as_deref(), Some("read failed"));
        assert!(!poison.is_set());
        assert_eq!(poison.take(), None);
    }
}
