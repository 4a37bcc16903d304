//! Machines for `whatif`: cards, link, processor, disk, read from TOML.

use serde::Deserialize;

/// A machine with up to three tiers of memory for experts: VRAM, RAM and disk.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hardware {
    /// Name in reports.
    pub name: String,
    /// Graphics cards; without them everything is computed on the processor.
    pub gpu: Option<Gpu>,
    /// The bus between RAM and each card; belongs to `gpu`.
    pub link: Option<Link>,
    /// Processor and RAM.
    pub cpu: Cpu,
    /// The disk that holds the model.
    pub disk: Disk,
}

/// Cards of one kind. Layers are split between them, so that capacities add up and speeds do not.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gpu {
    /// Number of cards.
    pub cards: u32,
    /// Memory of each card, bytes.
    pub vram_bytes: f64,
    /// Its bandwidth, bytes per second.
    pub vram_bytes_per_s: f64,
    /// Share of the bandwidth that kernels reach on one row of a batch.
    pub bandwidth_share: f64,
    /// Speed of batched kernels, operations per second.
    pub flops: f64,
    /// Launches and synchronisation of one layer, seconds.
    pub layer_overhead_s: f64,
    /// Memory of each card that holds no weights and no KV, bytes.
    pub reserved_bytes: f64,
}

/// The bus.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Copies from RAM to a card, bytes per second.
    pub bytes_per_s: f64,
    /// Until one copy begins, seconds.
    pub latency_s: f64,
}

/// Processor and RAM.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cpu {
    /// Memory, bytes.
    pub ram_bytes: f64,
    /// Memory that holds no experts and no dense weights, bytes.
    pub ram_reserved_bytes: f64,
    /// Weights that the processor reads when it computes, bytes per second.
    pub ram_bytes_per_s: f64,
    /// Speed of batched kernels, operations per second.
    pub flops: f64,
    /// Handing a layer's activations from a card to the processor and back, seconds.
    pub handoff_s: f64,
}

/// The disk.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Disk {
    /// Reads of exact ranges, bytes per second.
    pub bytes_per_s: f64,
    /// Reads through page faults, bytes per second.
    pub fault_bytes_per_s: f64,
    /// Until a batch of reads begins, seconds.
    pub latency_s: f64,
}

/// Why a machine or a model was refused.
#[derive(Debug, thiserror::Error)]
pub enum DescriptionError {
    /// Not TOML, or not of this form.
    #[error("{0}")]
    Syntax(#[from] Box<toml::de::Error>),
    /// A number that cannot be.
    #[error("{field} = {value} must lie within {low} and {high}")]
    Range {
        /// The field.
        field: &'static str,
        /// What it says.
        value: f64,
        /// Least.
        low: f64,
        /// Most.
        high: f64,
    },
    /// A card without a bus or a bus without a card.
    #[error("[gpu] and [link] belong together: give both or neither")]
    HalfGpu,
    /// No preset has this name.
    #[error("no {kind} is called {given:?}; there are {known}, or give a TOML file")]
    Unknown {
        /// Machine or model.
        kind: &'static str,
        /// What was given.
        given: String,
        /// What there is.
        known: String,
    },
    /// The layers are no shape of a model.
    #[error(transparent)]
    Shape(#[from] hotpin_controllers::ShapeError),
}

/// Machines that come with the program: name and text.
pub const PRESETS: [(&str, &str); 5] = [
    ("rtx-3090", include_str!("../../hardware/rtx-3090.toml")),
    (
        "2x-rtx-3090",
        include_str!("../../hardware/2x-rtx-3090.toml"),
    ),
    ("rtx-4090", include_str!("../../hardware/rtx-4090.toml")),
    ("rtx-5090", include_str!("../../hardware/rtx-5090.toml")),
    (
        "laptop-32gb",
        include_str!("../../hardware/laptop-32gb.toml"),
    ),
];

/// Most of anything: beyond this it is a slip of the unit.
const MOST: f64 = 1e18;

/// Refuses a value outside its range.
pub(super) fn within(
    field: &'static str,
    value: f64,
    low: f64,
    high: f64,
) -> Result<(), DescriptionError> {
    if (low..=high).contains(&value) {
        return Ok(());
    }
    Err(DescriptionError::Range {
        field,
        value,
        low,
        high,
    })
}

impl Hardware {
    /// Reads a machine's description.
    ///
    /// # Errors
    /// When it is no TOML, has unknown or missing keys, or a value is out of range.
    pub fn parse(text: &str) -> Result<Self, DescriptionError> {
        let hardware: Self = toml::from_str(text).map_err(Box::new)?;
        hardware.check()?;
        Ok(hardware)
    }

    /// A preset by name.
    ///
    /// # Errors
    /// When there is none.
    pub fn preset(name: &str) -> Result<Self, DescriptionError> {
        let found = PRESETS.into_iter().find(|preset| preset.0 == name);
        let (_, text) = found.ok_or_else(|| DescriptionError::Unknown {
            kind: "machine",
            given: name.to_owned(),
            known: PRESETS.map(|preset| preset.0).join(", "),
        })?;
        Self::parse(text)
    }

    fn check(&self) -> Result<(), DescriptionError> {
        let Cpu {
            ram_bytes,
            ram_reserved_bytes,
            ram_bytes_per_s,
            flops,
            handoff_s,
        } = self.cpu;
        within("cpu.ram_bytes", ram_bytes, 1.0, MOST)?;
        within("cpu.ram_reserved_bytes", ram_reserved_bytes, 0.0, ram_bytes)?;
        within("cpu.ram_bytes_per_s", ram_bytes_per_s, 1.0, MOST)?;
        within("cpu.flops", flops, 1.0, MOST)?;
        within("cpu.handoff_s", handoff_s, 0.0, 1.0)?;
        within("disk.bytes_per_s", self.disk.bytes_per_s, 1.0, MOST)?;
        within(
            "disk.fault_bytes_per_s",
            self.disk.fault_bytes_per_s,
            1.0,
            MOST,
        )?;
        within("disk.latency_s", self.disk.latency_s, 0.0, 1.0)?;
        match (&self.gpu, &self.link) {
            (None, None) => Ok(()),
            (Some(gpu), Some(link)) => gpu.check().and_then(|()| link.check()),
            _ => Err(DescriptionError::HalfGpu),
        }
    }
}

impl Gpu {
    fn check(&self) -> Result<(), DescriptionError> {
        within("gpu.cards", f64::from(self.cards), 1.0, 64.0)?;
        within("gpu.vram_bytes", self.vram_bytes, 1.0, MOST)?;
        within("gpu.vram_bytes_per_s", self.vram_bytes_per_s, 1.0, MOST)?;
        within("gpu.bandwidth_share", self.bandwidth_share, 0.01, 1.0)?;
        within("gpu.flops", self.flops, 1.0, MOST)?;
        within("gpu.layer_overhead_s", self.layer_overhead_s, 0.0, 1.0)?;
        within(
            "gpu.reserved_bytes",
            self.reserved_bytes,
            0.0,
            self.vram_bytes,
        )
    }

    /// Bytes that all cards have for weights and KV.
    #[must_use]
    pub fn usable_bytes(&self) -> f64 {
        f64::from(self.cards) * (self.vram_bytes - self.reserved_bytes)
    }

    /// Seconds to compute with `weight_bytes` read once and `operations`.
    #[must_use]
    pub fn compute_s(&self, weight_bytes: f64, operations: f64) -> f64 {
        let read_s = weight_bytes / (self.vram_bytes_per_s * self.bandwidth_share);
        read_s.max(operations / self.flops)
    }
}

impl Link {
    fn check(&self) -> Result<(), DescriptionError> {
        within("link.bytes_per_s", self.bytes_per_s, 1.0, MOST)?;
        within("link.latency_s", self.latency_s, 0.0, 1.0)
    }
}

impl Cpu {
    /// Seconds to compute with `weight_bytes` read once and `operations`.
    #[must_use]
    pub fn compute_s(&self, weight_bytes: f64, operations: f64) -> f64 {
        (weight_bytes / self.ram_bytes_per_s).max(operations / self.flops)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_are_what_their_names_say() {
        for (name, _) in PRESETS {
            assert_eq!(Hardware::preset(name).unwrap().name, name);
        }
        let error = Hardware::preset("abacus").unwrap_err().to_string();
        assert!(error.contains("rtx-3090"), "{error}");
        let one = Hardware::preset("rtx-3090").unwrap().gpu.unwrap();
        let two = Hardware::preset("2x-rtx-3090").unwrap().gpu.unwrap();
        assert_eq!(two.usable_bytes(), 2.0 * one.usable_bytes());
        assert_eq!(two.vram_bytes_per_s, one.vram_bytes_per_s);
    }

    #[test]
    fn nonsense_is_refused_by_name() {
        let text = PRESETS[0].1;
        let refused = |from: &str, to: &str| {
            let changed = text.replace(from, to);
            assert_ne!(changed, text);
            Hardware::parse(&changed).unwrap_err().to_string()
        };
        assert!(refused("cards = 1", "cards = 0").contains("gpu.cards"));
        assert!(refused("bytes_per_s = 25e9", "bytes_per_s = nan").contains("link.bytes_per_s"));
        assert!(refused("cards = 1", "cards = 1\nfans = 3").contains("fans"));
        let from = text.find("[link]").unwrap();
        let to = text.find("[cpu]").unwrap();
        let without = format!("{}{}", &text[..from], &text[to..]);
        assert!(matches!(
            Hardware::parse(&without),
            Err(DescriptionError::HalfGpu)
        ));
    }
}
