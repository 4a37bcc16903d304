//! What happens when a page of the mapped model cannot be read: the kernel then sends SIGBUS.

/// What is said. The handler may do little more than write it.
const SAID: &[u8] =
    b"hotpin: a page of the model could not be read: its file was cut short while it was \
in use, or its disk failed\n";

extern "C" fn end(_: libc::c_int) {
    // SAFETY: `write` and `_exit` may be called from signal handlers; the text is static.
    unsafe {
        libc::write(libc::STDERR_FILENO, SAID.as_ptr().cast(), SAID.len());
        libc::_exit(1);
    }
}

/// From now on the program ends with a message and exit code 1 when a page of a mapped file cannot be
/// read, instead of being killed without a word. No token is made of such a page.
pub fn end_on_lost_page() {
    // SAFETY: all zeros are a valid `sigaction`.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = end as extern "C" fn(libc::c_int) as usize;
    action.sa_flags = libc::SA_ONSTACK;
    // SAFETY: `action` is filled in, and the handler does only what handlers may.
    let code = unsafe { libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()) };
    debug_assert_eq!(code, 0, "SIGBUS may be handled");
}
