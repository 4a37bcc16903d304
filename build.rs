//! Lets `engine::model` decide whether llama.cpp reads a whole model file when it maps it.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // Calls of these from linked objects go to `__wrap_*` in src/engine/mapping.rs.
    for call in ["mmap", "posix_madvise"] {
        println!("cargo:rustc-link-arg=-Wl,--wrap={call}");
    }
}
