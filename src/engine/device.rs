//! The graphics devices that llama.cpp was built for: their memory, the largest tensor that they
//! compute with, and how fast bytes come and go.

use super::EngineError;
use hotpin_controllers::vram::DeviceMemory;
use llama_cpp_sys_4 as sys;
use std::ffi::{CStr, c_char};
use std::ptr::NonNull;
use std::time::Instant;

/// The backends that this program was built with, in words; `None` when it computes on CPUs alone.
#[must_use]
pub const fn gpu_backends() -> Option<&'static str> {
    match (cfg!(feature = "vulkan"), cfg!(feature = "cuda")) {
        (true, true) => Some("Vulkan and CUDA"),
        (true, false) => Some("Vulkan"),
        (false, true) => Some("CUDA"),
        (false, false) => None,
    }
}

/// Who knows how much of a device's memory is free.
pub trait MemorySource: Send + Sync + std::fmt::Debug {
    /// The memory now; `None` where the driver does not tell.
    fn memory(&self) -> Option<DeviceMemory>;
}

/// A graphics device. It lives as long as the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device(NonNull<sys::ggml_backend_device>);

// SAFETY: ggml's devices are made once, when the first is asked for, and never change; the calls
// here read them. Memory is asked of the driver, which does its own locking.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

/// Shape of one expert's part in a bank of slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BankRow {
    /// ggml's number of the type of its weights.
    pub ty: u32,
    /// Columns.
    pub columns: u64,
    /// Rows.
    pub rows: u64,
}

/// Bytes a second between host and device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// To the device, from memory like a mapped file's: not pinned.
    pub upload_bytes_per_s: f64,
    /// To the device, from memory that the driver has pinned; `None` where it does not.
    pub pinned_upload_bytes_per_s: Option<f64>,
    /// From the device.
    pub download_bytes_per_s: f64,
}

impl Device {
    /// The graphics devices, in llama.cpp's order.
    #[must_use]
    pub fn all() -> Vec<Self> {
        let _ = super::model::backend();
        // SAFETY: no preconditions; indices are below the count.
        let every = (0..unsafe { sys::ggml_backend_dev_count() }).filter_map(|index| {
            // SAFETY: the index is below the count, which never shrinks.
            NonNull::new(unsafe { sys::ggml_backend_dev_get(index) }).map(Self)
        });
        every.filter(|device| device.is_graphics()).collect()
    }

    /// The device that weights are placed on: the first.
    ///
    /// # Errors
    /// [`EngineError::NoDevice`] with what to do.
    pub fn first() -> Result<Self, EngineError> {
        let Some(backends) = gpu_backends() else {
            return Err(EngineError::NoDevice(
                "this program was built for CPUs alone; `make gpu` builds it with Vulkan, and `cargo build --release --features cuda` with CUDA".into(),
            ));
        };
        Self::all().into_iter().next().ok_or_else(|| {
            EngineError::NoDevice(format!(
                "llama.cpp's {backends} finds none; check the driver (`vulkaninfo --summary`, `nvidia-smi`). Mesa's software device counts only when GGML_VK_VISIBLE_DEVICES=0 names it"
            ))
        })
    }

    pub(super) const fn as_ptr(self) -> sys::ggml_backend_dev_t {
        self.0.as_ptr()
    }

    fn is_graphics(self) -> bool {
        // SAFETY: a device lives as long as the process.
        let kind = unsafe { sys::ggml_backend_dev_type(self.as_ptr()) };
        kind == sys::GGML_BACKEND_DEVICE_TYPE_GPU || kind == sys::GGML_BACKEND_DEVICE_TYPE_IGPU
    }

    /// Whether it computes in the host's own memory.
    #[must_use]
    pub fn is_integrated(self) -> bool {
        // SAFETY: as above.
        unsafe { sys::ggml_backend_dev_type(self.as_ptr()) == sys::GGML_BACKEND_DEVICE_TYPE_IGPU }
    }

    /// ggml's name, such as `Vulkan0`.
    #[must_use]
    pub fn name(self) -> String {
        // SAFETY: as above; ggml returns a string that lives as long.
        unsafe { text(sys::ggml_backend_dev_name(self.as_ptr())) }
    }

    /// The driver's name of it.
    #[must_use]
    pub fn description(self) -> String {
        // SAFETY: as above.
        unsafe { text(sys::ggml_backend_dev_description(self.as_ptr())) }
    }

    /// Whether it is Mesa's software device, which computes on the processor.
    #[must_use]
    pub fn is_software(self) -> bool {
        self.description().contains("llvmpipe")
    }

    /// Bytes that tensors in its memory are aligned to.
    #[must_use]
    pub fn alignment_bytes(self) -> u64 {
        // SAFETY: as above; a device has a buffer type.
        unsafe {
            sys::ggml_backend_buft_get_alignment(sys::ggml_backend_dev_buffer_type(self.as_ptr()))
                as u64
        }
    }

    /// The most slots of these parts that one bank may have so that the device still multiplies by
    /// it; `most` where none of its limits is met. Beyond that llama.cpp aborts the process.
    #[must_use]
    pub fn most_slots(self, row: BankRow, most: u64) -> u64 {
        if self.multiplies(row, most) {
            return most;
        }
        // The first that is known to be refused, and the last that is not.
        let (mut taken, mut refused) = (0, most);
        while taken + 1 < refused {
            let middle = taken + (refused - taken) / 2;
            if self.multiplies(row, middle) {
                taken = middle;
            } else {
                refused = middle;
            }
        }
        taken
    }

    /// The largest tensor that it multiplies by, bytes; `None` where that is above `most_bytes`.
    #[must_use]
    pub fn largest_tensor_bytes(self, most_bytes: u64) -> Option<u64> {
        /// One slot: 1024 x 1024 bytes of 8-bit blocks have 17/16 MiB.
        const ROW: BankRow = BankRow {
            ty: sys::GGML_TYPE_Q8_0,
            columns: 1024,
            rows: 32,
        };
        const ROW_BYTES: u64 = 1024 / 32 * 34 * 32;
        let most = most_bytes / ROW_BYTES;
        let slots = self.most_slots(ROW, most);
        (slots < most).then_some(slots * ROW_BYTES)
    }

    /// Whether it multiplies by a tensor of `slots` experts' parts.
    #[must_use]
    pub fn multiplies(self, row: BankRow, slots: u64) -> bool {
        let as_i64 = |n: u64| i64::try_from(n).ok();
        let (Some(columns), Some(rows), Some(slots)) =
            (as_i64(row.columns), as_i64(row.rows), as_i64(slots.max(1)))
        else {
            return false;
        };
        // SAFETY: the size is that of ggml's own bookkeeping; no_alloc keeps tensors without data.
        let context = unsafe {
            sys::ggml_init(sys::ggml_init_params {
                mem_size: sys::ggml_tensor_overhead() * 8,
                mem_buffer: std::ptr::null_mut(),
                no_alloc: true,
            })
        };
        if context.is_null() {
            return false;
        }
        // SAFETY: the context is alive until it is freed here, and its tensors with it; the shapes
        // are those of llama.cpp's own use: one token, one expert.
        unsafe {
            let weights = sys::ggml_new_tensor_3d(context, row.ty, columns, rows, slots);
            let input = sys::ggml_new_tensor_3d(context, sys::GGML_TYPE_F32, columns, 1, 1);
            let choice = sys::ggml_new_tensor_2d(context, sys::GGML_TYPE_I32, 1, 1);
            let product = sys::ggml_mul_mat_id(context, weights, input, choice);
            let takes = sys::ggml_backend_dev_supports_op(self.as_ptr(), product);
            sys::ggml_free(context);
            takes
        }
    }

    /// Measures the link with `bytes` each way, the fastest of a few tries.
    ///
    /// # Errors
    /// [`EngineError::NoDevice`] where the device gives no memory for it.
    pub fn measure_link(self, bytes: usize) -> Result<Link, EngineError> {
        let refused =
            || EngineError::NoDevice(format!("{}: no memory to measure its link", self.name()));
        // SAFETY: as above.
        let on_device = unsafe { sys::ggml_backend_dev_buffer_type(self.as_ptr()) };
        // SAFETY: as above.
        let pinned = unsafe { sys::ggml_backend_dev_host_buffer_type(self.as_ptr()) };
        let there = Block::new(on_device, bytes).ok_or_else(refused)?;
        // Written, so that its pages are there; not pinned, like those of a mapped file.
        let mut here = vec![1_u8; bytes];
        let upload_bytes_per_s = there.fastest(bytes, |tensor| {
            // SAFETY: `here` has the tensor's length.
            unsafe { sys::ggml_backend_tensor_set(tensor, here.as_ptr().cast(), 0, bytes) };
        });
        let pinned = NonNull::new(pinned).and_then(|kind| Block::new(kind.as_ptr(), bytes));
        let pinned_upload_bytes_per_s = pinned.map(|pinned| {
            let from = pinned.address();
            // SAFETY: the block has `bytes` of host memory, which is written before it is read.
            unsafe { from.write_bytes(1, bytes) };
            there.fastest(bytes, |tensor| {
                // SAFETY: the block has the tensor's length and outlives the call.
                unsafe { sys::ggml_backend_tensor_set(tensor, from.cast_const().cast(), 0, bytes) };
            })
        });
        let download_bytes_per_s = there.fastest(bytes, |tensor| {
            // SAFETY: `here` has the tensor's length and nobody else reads it.
            unsafe { sys::ggml_backend_tensor_get(tensor, here.as_mut_ptr().cast(), 0, bytes) };
        });
        Ok(Link {
            upload_bytes_per_s,
            pinned_upload_bytes_per_s,
            download_bytes_per_s,
        })
    }
}

impl MemorySource for Device {
    fn memory(&self) -> Option<DeviceMemory> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: as above; both places are ours.
        unsafe { sys::ggml_backend_dev_memory(self.as_ptr(), &raw mut free, &raw mut total) };
        (total > 0).then_some(DeviceMemory {
            total_bytes: total as u64,
            free_bytes: free as u64,
        })
    }
}

/// # Safety
/// `raw` is null or NUL-terminated and valid for the call.
unsafe fn text(raw: *const c_char) -> String {
    if raw.is_null() {
        return String::new();
    }
    // SAFETY: by the caller.
    unsafe { CStr::from_ptr(raw) }
        .to_string_lossy()
        .into_owned()
}

/// A tensor of bytes in a buffer of its own.
struct Block {
    context: NonNull<sys::ggml_context>,
    buffer: NonNull<sys::ggml_backend_buffer>,
    tensor: *mut sys::ggml_tensor,
}

/// Tries of a measurement; the fastest counts.
const TRIES: u32 = 3;

impl Block {
    fn new(kind: sys::ggml_backend_buffer_type_t, bytes: usize) -> Option<Self> {
        let count = i64::try_from(bytes).ok()?;
        // SAFETY: as in `multiplies`; what was made is freed when a later step fails.
        unsafe {
            let context = NonNull::new(sys::ggml_init(sys::ggml_init_params {
                mem_size: sys::ggml_tensor_overhead() * 2,
                mem_buffer: std::ptr::null_mut(),
                no_alloc: true,
            }))?;
            let tensor = sys::ggml_new_tensor_1d(context.as_ptr(), sys::GGML_TYPE_I8, count);
            let buffer = sys::ggml_backend_alloc_ctx_tensors_from_buft(context.as_ptr(), kind);
            let Some(buffer) = NonNull::new(buffer) else {
                sys::ggml_free(context.as_ptr());
                return None;
            };
            Some(Self {
                context,
                buffer,
                tensor,
            })
        }
    }

    fn address(&self) -> *mut u8 {
        // SAFETY: the tensor lives as long as the block.
        unsafe { (*self.tensor).data.cast() }
    }

    /// Bytes a second of the fastest try.
    fn fastest(&self, bytes: usize, mut copy: impl FnMut(*mut sys::ggml_tensor)) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "a rate for reports")]
        let bytes = bytes as f64;
        let mut best = 0.0_f64;
        for _ in 0..TRIES {
            let began = Instant::now();
            copy(self.tensor);
            best = best.max(bytes / began.elapsed().as_secs_f64().max(1e-9));
        }
        best
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: both were made in `new` and nobody else has them.
        unsafe {
            sys::ggml_backend_buffer_free(self.buffer.as_ptr());
            sys::ggml_free(self.context.as_ptr());
        }
    }
}
