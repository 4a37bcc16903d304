//! llama.cpp's log lines, routed to `tracing`; the last warnings are kept for error messages.

use llama_cpp_sys_4 as sys;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::ffi::{CStr, c_char, c_void};
use std::sync::{Mutex, Once};

/// Lines kept for error messages.
const KEPT_LINES: usize = 8;

static RECENT: Mutex<VecDeque<String>> = Mutex::new(VecDeque::new());
static INSTALL: Once = Once::new();

thread_local! {
    /// Lines that this thread's calls cause, while somebody listens.
    static HEARD: RefCell<Option<Vec<String>>> = const { RefCell::new(None) };
}

/// Runs `call`, and returns every line that llama.cpp logged on this thread meanwhile as well.
pub(super) fn listen<T>(call: impl FnOnce() -> T) -> (T, Vec<String>) {
    struct Deaf;
    impl Drop for Deaf {
        fn drop(&mut self) {
            HEARD.set(None);
        }
    }
    HEARD.set(Some(Vec::new()));
    let deaf = Deaf;
    let result = call();
    let heard = HEARD.take().unwrap_or_default();
    drop(deaf);
    (result, heard)
}

/// Sends llama.cpp's log to `tracing` from now on.
pub(super) fn install() {
    INSTALL.call_once(|| {
        // SAFETY: `forward` is a plain function that stays valid for the life of the process and
        // ignores its user data.
        unsafe { sys::llama_log_set(Some(forward), std::ptr::null_mut()) };
    });
}

/// The last warnings and errors, oldest first, joined by `; `.
pub(super) fn recent() -> String {
    let lines = RECENT
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    if lines.is_empty() {
        return "no reason was given".to_owned();
    }
    lines
        .iter()
        .map(String::as_str)
        .collect::<Vec<_>>()
        .join("; ")
}

/// Forgets the kept lines, so that the next error quotes only its own.
pub(super) fn forget() {
    RECENT
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
        .clear();
}

unsafe extern "C" fn forward(level: sys::ggml_log_level, text: *const c_char, _: *mut c_void) {
    if text.is_null() {
        return;
    }
    // SAFETY: llama.cpp passes a NUL-terminated string that lives for the call.
    let line = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    let line = line.trim();
    if line.is_empty() || line == "." {
        return;
    }
    // An unwind must not cross the C++ frames above us.
    let _ = std::panic::catch_unwind(|| {
        HEARD.with_borrow_mut(|heard| {
            if let Some(heard) = heard {
                heard.push(line.to_owned());
            }
        });
    });
    let _ = std::panic::catch_unwind(|| match level {
        sys::GGML_LOG_LEVEL_ERROR => {
            keep(line);
            tracing::warn!(target: "llama.cpp", "{line}");
        }
        sys::GGML_LOG_LEVEL_WARN => {
            keep(line);
            tracing::info!(target: "llama.cpp", "{line}");
        }
        _ => tracing::debug!(target: "llama.cpp", "{line}"),
    });
}

fn keep(line: &str) {
    let mut lines = RECENT
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    if lines.len() == KEPT_LINES {
        lines.pop_front();
    }
    lines.push_back(line.to_owned());
}
