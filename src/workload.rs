//! The built-in texts: one a domain, for benchmarks and for calibrating demo models.

/// Name and text of every domain, alphabetically.
#[must_use]
pub fn built_in() -> [(&'static str, &'static str); 6] {
    [
        ("math", include_str!("../workload/math.txt")),
        ("prose", include_str!("../workload/prose.txt")),
        ("python", include_str!("../workload/python.txt")),
        ("ru", include_str!("../workload/ru.txt")),
        ("rust", include_str!("../workload/rust.txt")),
        ("zh", include_str!("../workload/zh.txt")),
    ]
}
