//! What llama.cpp's expert pool would hold at a size: groups of equal layers, their slots and banks.
//!
//! The arithmetic is that of the pinned llama.cpp (`src/llama-moe-cache.cpp`), so that slots agree to
//! the last one. A group is the layers of one device whose expert tensors are alike; each of its
//! tensors has a *bank*, one allocation of all slots and one more.

mod group;
mod parts;
mod sizes;

use super::Arrangement;
use crate::ids::ModelShape;
pub(super) use group::Group;
pub use group::{GroupPlan, PoolPlan};
use parts::check_layer;
pub use parts::{DeviceLayout, LayerLayout, LayoutError, TensorLayout};

/// Layers and devices of a model, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct PoolLayout {
    layers: Vec<LayerLayout>,
    devices: Vec<DeviceLayout>,
    pub(super) groups: Vec<Group>,
    /// Weight of each device in the split of a size, and the sum.
    weights: Vec<f64>,
    weight_sum: f64,
    device_host_bytes: Vec<u64>,
    most_top_k: u32,
}

impl PoolLayout {
    /// Groups layers by device and tensors. `layers` are all MoE layers, in graph order, those without
    /// a device too.
    ///
    /// # Errors
    /// [`LayoutError`]: no layer has a device, or a layer or device is not a usable one.
    pub fn new(layers: Vec<LayerLayout>, devices: Vec<DeviceLayout>) -> Result<Self, LayoutError> {
        for (number, device) in devices.iter().enumerate() {
            let usable = device.alignment_bytes > 0
                && device.alignment_bytes <= 1 << 30
                && device.split >= 0.0
                && device.split.is_finite();
            if !usable {
                return Err(LayoutError::Device {
                    device: number,
                    alignment_bytes: device.alignment_bytes,
                    split: device.split,
                });
            }
        }
        for (number, layer) in layers.iter().enumerate() {
            check_layer(number, layer, devices.len())?;
        }
        let mut groups: Vec<Group> = Vec::new();
        let mut device_host_bytes = vec![0; devices.len()];
        let mut refs: Vec<(usize, &[TensorLayout], u32)> = Vec::new();
        for (number, layer) in layers.iter().enumerate() {
            let Some(device) = layer.device else { continue };
            let key = (device, layer.tensors.as_slice(), layer.experts);
            let at = refs
                .iter()
                .position(|other| *other == key)
                .unwrap_or_else(|| {
                    refs.push(key);
                    groups.push(Group {
                        device,
                        layers: Vec::new(),
                        experts: layer.experts,
                        tensor_bytes: layer.tensors.iter().map(|t| t.expert_bytes).collect(),
                        host_bytes: 0,
                        bound_slots: None,
                    });
                    refs.len() - 1
                });
            groups[at].layers.push(number);
            groups[at].host_bytes += layer.bytes();
            device_host_bytes[device] += layer.bytes();
        }
        if groups.is_empty() {
            return Err(LayoutError::NoLayers);
        }
        let bytes = layers
            .iter()
            .map(LayerLayout::bytes)
            .fold(0, u64::saturating_add);
        if bytes > ModelShape::MAX_BYTES {
            return Err(LayoutError::TooLarge { bytes });
        }
        let weights = weights(&devices, &device_host_bytes);
        Ok(Self {
            weight_sum: weights.iter().sum(),
            weights,
            most_top_k: layers.iter().map(|layer| layer.top_k).max().unwrap_or(0),
            layers,
            devices,
            groups,
            device_host_bytes,
        })
    }

    /// Takes over other splits of the devices, as when the next context is made with other bytes free;
    /// devices without one keep theirs.
    pub fn split(&mut self, splits: &[f64]) {
        for (device, &split) in self.devices.iter_mut().zip(splits) {
            if split >= 0.0 && split.is_finite() {
                device.split = split;
            }
        }
        self.weights = weights(&self.devices, &self.device_host_bytes);
        self.weight_sum = self.weights.iter().sum();
    }

    /// The group that a MoE layer belongs to must have no more slots than this, which its device was
    /// asked (ggml's `supports_op` of a bank of so many). [`Self::largest_bytes`] keeps to it.
    pub fn bound_slots(&mut self, layer: usize, most_slots: u32) {
        for group in &mut self.groups {
            if group.layers.contains(&layer) {
                group.bound_slots = Some(most_slots);
            }
        }
    }

    /// The MoE layers.
    #[must_use]
    pub fn layers(&self) -> &[LayerLayout] {
        &self.layers
    }

    /// The devices.
    #[must_use]
    pub fn devices(&self) -> &[DeviceLayout] {
        &self.devices
    }

    /// Experts routed to a token in the layer that routes to most.
    #[must_use]
    pub const fn most_top_k(&self) -> u32 {
        self.most_top_k
    }

    /// Bytes of all experts of the layers that have a device.
    #[must_use]
    pub fn host_bytes(&self) -> u64 {
        self.device_host_bytes.iter().sum()
    }

    /// Slots and banks of a pool of `pool_bytes` (`moe_cache_size`).
    ///
    /// # Errors
    /// [`LayoutError::TooSmall`], where llama.cpp makes no context at all.
    pub fn plan(&self, pool_bytes: u64) -> Result<PoolPlan, LayoutError> {
        let plan = self.plan_any(pool_bytes);
        if plan.groups.iter().any(|group| group.slots > 0) {
            return Ok(plan);
        }
        Err(LayoutError::TooSmall {
            bytes: pool_bytes,
            least_bytes: self.least_bytes(),
        })
    }

    /// The MoE layers whose experts lie in VRAM as a whole when `bytes` are given to that, split among
    /// the devices as a pool would be: on each device as many as fit, from its last layer on, those left out of
    /// which a tensor is larger than a bank may be. Ascending.
    #[must_use]
    pub fn static_layers(&self, bytes: u64) -> Vec<usize> {
        let part = |weight: &f64| bytes as f64 * weight / self.weight_sum;
        let mut left: Vec<f64> = self.weights.iter().map(part).collect();
        let mut chosen: Vec<usize> = Vec::new();
        let mut closed = vec![false; self.devices.len()];
        for (number, layer) in self.layers.iter().enumerate().rev() {
            let Some(device) = layer.device else { continue };
            if !self.devices[device].bears(layer) {
                continue;
            }
            let need = layer.bytes() as f64;
            if closed[device] || need > left[device] {
                closed[device] = true;
                continue;
            }
            left[device] -= need;
            chosen.push(number);
        }
        chosen.reverse();
        chosen
    }

    /// Bytes that an arrangement takes on each device for experts.
    #[must_use]
    pub fn device_bytes(&self, arrangement: Arrangement) -> Vec<u64> {
        match arrangement {
            Arrangement::Cpu => vec![0; self.devices.len()],
            Arrangement::Reload { pool_bytes } => self.plan_any(pool_bytes).device_bytes,
            Arrangement::Static { bytes } => {
                let mut sums = vec![0; self.devices.len()];
                for number in self.static_layers(bytes) {
                    let layer = &self.layers[number];
                    if let Some(device) = layer.device {
                        sums[device] += layer.bytes();
                    }
                }
                sums
            }
        }
    }

    pub(super) fn plan_any(&self, pool_bytes: u64) -> PoolPlan {
        let mut device_bytes = vec![0; self.devices.len()];
        let groups = self.groups.iter().map(|group| {
            let device = &self.devices[group.device];
            // In this order upstream rounds.
            let device_part = pool_bytes as f64 * self.weights[group.device] / self.weight_sum;
            let part = device_part * group.host_bytes as f64;
            let host_bytes = self.device_host_bytes[group.device] as f64;
            let budget_bytes = crate::num::to_bytes(part / host_bytes);
            let slots = group.slots_in(budget_bytes, device.alignment_bytes);
            // A layer could not compute a single token with fewer.
            let cached = slots >= u64::from(self.most_top_k);
            let slots = if cached { slots } else { 0 };
            let (bytes, largest_bank_bytes) = if cached {
                (
                    group.banks_bytes(slots, device.alignment_bytes),
                    group.largest_bank_bytes(slots),
                )
            } else {
                (0, 0)
            };
            device_bytes[group.device] += bytes;
            GroupPlan {
                device: group.device,
                layers: group.layers.len(),
                slots: to_slots(slots),
                experts: to_slots(group.most_slots()),
                largest_bank_bytes,
                bytes,
            }
        });
        let groups = groups.collect();
        PoolPlan {
            groups,
            device_bytes,
        }
    }
}

/// Each device's weight in the split of a size; those without experts to cache have none.
fn weights(devices: &[DeviceLayout], host_bytes: &[u64]) -> Vec<f64> {
    let weigh = |even: bool| -> Vec<f64> {
        devices
            .iter()
            .zip(host_bytes)
            .map(|(device, &bytes)| match (bytes, even) {
                (0, _) => 0.0,
                (_, true) => 1.0,
                (_, false) => device.split,
            })
            .collect()
    };
    let given = weigh(false);
    if given.iter().sum::<f64>() > 0.0 {
        given
    } else {
        weigh(true)
    }
}

fn to_slots(slots: u64) -> u32 {
    u32::try_from(slots).unwrap_or(u32::MAX)
}
