//! Graphics devices: memory, limits and the link to them.

use super::{Check, Facts};
use crate::engine::{Device, Link, MemorySource, gpu_backends};
use crate::size::format_bytes;

/// What the link is measured with, each way.
const LINK_BYTES: usize = 64 << 20;
/// Above this no bound on a tensor matters.
const MOST_TENSOR_BYTES: u64 = 1 << 40;

/// A graphics device.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceFact {
    /// ggml's name.
    pub name: String,
    /// The driver's name.
    pub description: String,
    /// Free and total memory, bytes.
    pub memory: Option<(u64, u64)>,
    /// The largest tensor that it multiplies by, bytes; `None` where no bound was met.
    pub largest_tensor_bytes: Option<u64>,
    /// Whether it computes in the host's memory.
    pub integrated: bool,
    /// Whether it is no device at all, but Mesa's software.
    pub software: bool,
    /// The link, or why it was not measured.
    pub link: Result<Link, String>,
}

impl DeviceFact {
    /// Looks at every device that this program can use, which compiles some of what they compute with.
    ///
    /// # Errors
    /// In words, where it can use none.
    pub fn all() -> Result<Vec<Self>, String> {
        if gpu_backends().is_none() {
            return Err(
                "this program was built for CPUs alone; `make gpu` builds it with Vulkan".into(),
            );
        }
        Ok(Device::all().into_iter().map(Self::of).collect())
    }

    fn of(device: Device) -> Self {
        Self {
            name: device.name(),
            description: device.description(),
            memory: device.memory().map(|m| (m.free_bytes, m.total_bytes)),
            largest_tensor_bytes: device.largest_tensor_bytes(MOST_TENSOR_BYTES),
            integrated: device.is_integrated(),
            software: device.is_software(),
            link: device.measure_link(LINK_BYTES).map_err(|e| e.to_string()),
        }
    }
}

pub(super) fn checks(facts: &Facts) -> Vec<Check> {
    match &facts.devices {
        None => Vec::new(),
        Some(Err(why)) => vec![Check::ok("device", why.clone())],
        Some(Ok(devices)) if devices.is_empty() => vec![Check::warn(
            "device",
            "llama.cpp finds no graphics device, so that --gpu-layers and --vram are refused",
            "vulkaninfo --summary",
        )],
        Some(Ok(devices)) => devices.iter().flat_map(of_device).collect(),
    }
}

fn of_device(device: &DeviceFact) -> Vec<Check> {
    let memory = device.memory.map_or_else(
        || "memory unknown".to_owned(),
        |(free, total)| format!("{} of {} free", format_bytes(free), format_bytes(total)),
    );
    let bound = device.largest_tensor_bytes.map_or_else(
        || "no bound on a tensor was met".to_owned(),
        |bytes| {
            format!(
                "a tensor has at most {} (maxStorageBufferRange, or what ggml makes of it): no pool is made with larger banks",
                format_bytes(bytes)
            )
        },
    );
    let kind = match (device.software, device.integrated) {
        (true, _) => ", which computes on the processor and is for tests alone",
        (false, true) => ", in the host's memory",
        (false, false) => "",
    };
    let said = format!(
        "{} ({}){kind}: {memory}; {bound}",
        device.name, device.description
    );
    let link = match &device.link {
        Ok(link) => Check::ok("device link", link_said(device, link)),
        Err(why) => Check::warn(
            "device link",
            why.clone(),
            "free some of the device's memory",
        ),
    };
    vec![Check::ok("device", said), link]
}

fn link_said(device: &DeviceFact, link: &Link) -> String {
    let gb = |rate: f64| format!("{:.1} GB/s", rate / 1e9);
    let pinned = link.pinned_upload_bytes_per_s.map_or_else(
        || "the driver pins no host memory".to_owned(),
        |rate| format!("{} from pinned memory", gb(rate)),
    );
    format!(
        "{}: {} to the device from memory like a mapped model's, which is not pinned ({pinned}); {} back",
        device.name,
        gb(link.upload_bytes_per_s),
        gb(link.download_bytes_per_s),
    )
}

#[cfg(test)]
mod tests {
    use super::{DeviceFact, of_device};
    use crate::doctor::Level;
    use crate::engine::Link;

    #[test]
    fn a_device_is_told_with_its_bound_and_its_link() {
        let mut device = DeviceFact {
            name: "Vulkan0".into(),
            description: "a card".into(),
            memory: Some((3 << 30, 8 << 30)),
            largest_tensor_bytes: Some(128 << 20),
            integrated: false,
            software: false,
            link: Ok(Link {
                upload_bytes_per_s: 9e9,
                pinned_upload_bytes_per_s: Some(12e9),
                download_bytes_per_s: 8e9,
            }),
        };
        let checks = of_device(&device);
        assert!(
            checks[0].said.contains("3.00 GiB of 8.00 GiB free"),
            "{}",
            checks[0].said
        );
        assert!(checks[0].said.contains("128 MiB"), "{}", checks[0].said);
        assert!(
            checks[1].said.contains("9.0 GB/s to the device"),
            "{}",
            checks[1].said
        );
        assert!(
            checks[1].said.contains("not pinned (12.0 GB/s from pinned"),
            "{}",
            checks[1].said
        );
        device.link = Err("no memory".into());
        assert_eq!(of_device(&device)[1].level, Level::Warn);
    }
}
