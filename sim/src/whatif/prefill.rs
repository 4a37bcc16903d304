//! Reading a prompt in batches: which experts a batch needs, and how their bytes come.
//!
//! A batch of some hundred tokens needs nearly every expert of a layer, each for many rows. What is
//! missing in VRAM is copied once for the union of a batch into room of its own, so that the prompt
//! does not flush what decoding uses; or it is computed on the processor, whichever is faster.

use super::Setup;
use super::decode::Decoder;
use super::locality::Sequence;
use super::strategy::{Experts, Miss};
use hotpin_controllers::ExpertId;
use std::collections::HashMap;

impl Decoder<'_> {
    /// Tokens per second of one batch of `tokens`, from the present state of the caches.
    pub(super) fn prefill_tok_s(&mut self, setup: &Setup, tokens: u32) -> f64 {
        let unions = unions(setup, &self.shape, tokens);
        let rows = f64::from(tokens);
        let mut total_s = 0.0;
        let mut computed_before_s = 0.0;
        for (layer, union) in unions.iter().enumerate() {
            let (serial_s, copy_s, compute_s) = self.prefill_layer(layer, union, rows);
            // Under reload a layer's copies run while the layer before is computed: a union of a
            // whole batch is foreseeable. Elsewhere llama.cpp copies, then computes.
            let overlapped_s = if self.placement.vram.is_some() {
                (copy_s - computed_before_s).max(0.0)
            } else {
                copy_s
            };
            total_s += serial_s + overlapped_s + compute_s;
            computed_before_s = compute_s;
        }
        rows / total_s
    }

    /// Seconds of disk, of copies and of computing for one layer.
    fn prefill_layer(
        &mut self,
        layer: usize,
        union: &HashMap<u32, u32>,
        rows: f64,
    ) -> (f64, f64, f64) {
        let place = self.placement.layers[layer];
        let cpu = &self.hardware.cpu;
        let dense_bytes = self.model.dense_layer_bytes;
        let dense_operations = self.model.dense_operations(dense_bytes, rows);
        let operations = |ids: &[u32]| {
            let routed: u32 = ids.iter().map(|id| union[id]).sum();
            self.model.expert_operations(f64::from(routed))
        };
        let bytes = |ids: &[u32]| ids.len() as f64 * self.model.expert_bytes;
        let mut all: Vec<u32> = union.keys().copied().collect();
        all.sort_unstable();
        let (Some(gpu), Some(link)) = (&self.hardware.gpu, &self.hardware.link) else {
            let compute_s = cpu.compute_s(dense_bytes, dense_operations)
                + cpu.compute_s(bytes(&all), operations(&all));
            return (self.absent_s(&all), 0.0, compute_s);
        };
        // Of a layer that lies in RAM the dense weights are copied too.
        let dense_copy_bytes = if place.dense_on_card {
            0.0
        } else {
            dense_bytes
        };
        let missing: Vec<u32> = match place.experts {
            Experts::Vram => Vec::new(),
            Experts::Cpu => all.clone(),
            Experts::Cached => {
                let base = self.shape.id(layer, 0).0;
                let resident = |id: u32| match (&self.vram, &self.card) {
                    (Some(vram), _) => vram.store.is_resident(ExpertId(id)),
                    (None, Some(card)) => card.holds(layer, id - base),
                    (None, None) => false,
                };
                all.iter().copied().filter(|&id| !resident(id)).collect()
            }
        };
        let dense_s = gpu.layer_overhead_s + gpu.compute_s(dense_bytes, dense_operations);
        let copy_s = if missing.is_empty() && dense_copy_bytes == 0.0 {
            0.0
        } else {
            link.latency_s + (bytes(&missing) + dense_copy_bytes) / link.bytes_per_s
        };
        let on_card_s = gpu.compute_s(bytes(&all), operations(&all));
        let by_copy = (copy_s, dense_s + on_card_s);
        let missing_cpu_s = cpu.compute_s(bytes(&missing), operations(&missing)) + cpu.handoff_s;
        let may_assist = place.experts == Experts::Cpu || self.placement.miss == Miss::Assist;
        let absent_s = self.absent_s(&missing);
        if may_assist && !missing.is_empty() && dense_s + missing_cpu_s < by_copy.0 + by_copy.1 {
            return (absent_s, 0.0, dense_s + missing_cpu_s);
        }
        (absent_s, by_copy.0, by_copy.1)
    }

    /// Seconds that the disk takes for what is not in RAM. A prompt does not change what is kept.
    fn absent_s(&self, experts: &[u32]) -> f64 {
        let absent = experts
            .iter()
            .filter(|&&id| !self.ram.store.is_resident(ExpertId(id)))
            .count();
        if absent == 0 {
            return 0.0;
        }
        let bytes = absent as f64 * self.model.expert_bytes;
        self.hardware.disk.latency_s + bytes / self.placement.disk_bytes_per_s
    }
}

/// For each layer the experts of a batch with their rows.
fn unions(
    setup: &Setup,
    shape: &hotpin_controllers::ModelShape,
    tokens: u32,
) -> Vec<HashMap<u32, u32>> {
    let mut sequence = Sequence::new(&setup.source, shape, setup.seed, 0, 1);
    let mut unions = vec![HashMap::new(); shape.layers()];
    for _ in 0..tokens {
        for &id in sequence.next_token() {
            *unions[shape.layer_of(ExpertId(id))].entry(id).or_insert(0) += 1;
        }
    }
    unions
}
