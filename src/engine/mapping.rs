//! Mapping a model file without reading it.
//!
//! llama.cpp maps model files with `MAP_POPULATE` and advises the kernel to read all of them, with no
//! option against it: a model larger than memory is read once in full, through memory that it does
//! not fit in, before the first token. The build (build.rs) routes these two calls through here;
//! while [`on_demand`] runs, on its thread, mappings are made without reading. Everything else
//! passes through unchanged, and so does stock loading (`--policy off`).

use std::cell::Cell;
use std::ffi::{c_int, c_void};

thread_local! {
    static ON_DEMAND: Cell<bool> = const { Cell::new(false) };
}

/// Runs `load`; files that it maps are read when their pages are touched.
pub(super) fn on_demand<T>(load: impl FnOnce() -> T) -> T {
    struct Reset;
    impl Drop for Reset {
        fn drop(&mut self) {
            ON_DEMAND.set(false);
        }
    }
    ON_DEMAND.set(true);
    let _reset = Reset;
    load()
}

/// `mmap` of linked objects.
///
/// # Safety
/// As for mmap(2).
#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap_mmap(
    address: *mut c_void,
    len: usize,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: libc::off64_t,
) -> *mut c_void {
    let flags = if ON_DEMAND.try_with(Cell::get).unwrap_or(false) {
        flags & !libc::MAP_POPULATE
    } else {
        flags
    };
    // SAFETY: the caller's contract; without MAP_POPULATE the same mapping is made.
    unsafe { libc::mmap64(address, len, protection, flags, fd, offset) }
}

/// `posix_madvise` of linked objects; returns the error number.
///
/// # Safety
/// As for posix_madvise(3).
#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap_posix_madvise(
    address: *mut c_void,
    len: usize,
    advice: c_int,
) -> c_int {
    let reads = advice == libc::POSIX_MADV_WILLNEED;
    // The C library ignores DONTNEED too: it would lose what was written.
    let ignored = advice == libc::POSIX_MADV_DONTNEED;
    if ignored || reads && ON_DEMAND.try_with(Cell::get).unwrap_or(false) {
        return 0;
    }
    // SAFETY: the caller's contract; the remaining advice has the same numbers in both calls.
    if unsafe { libc::madvise(address, len, advice) } == 0 {
        return 0;
    }
    std::io::Error::last_os_error()
        .raw_os_error()
        .unwrap_or(libc::EINVAL)
}
