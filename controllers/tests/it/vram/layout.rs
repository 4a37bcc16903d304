//! Slots, banks and sizes.

use super::{DEVICE, small, tensor, uniform};
use crate::plant::{GIB, MIB};
use hotpin_controllers::vram::{
    Arrangement, DeviceLayout, LayerLayout, LayoutError, Pool, PoolLayout,
};

fn layer(device: Option<usize>, tensors: &[u64]) -> LayerLayout {
    LayerLayout {
        device,
        experts: 16,
        top_k: 2,
        tensors: tensors.iter().map(|&bytes| tensor(bytes)).collect(),
    }
}

/// The loop of llama.cpp, slot by slot.
fn counted(sizes: &[u64], most: u64, budget: u64) -> u64 {
    let fits = |slots: u64| {
        let banks = sizes
            .iter()
            .map(|bytes| (bytes * (slots + 1)).next_multiple_of(128));
        banks.sum::<u64>() <= budget
    };
    let mut slots = 0;
    while slots < most && fits(slots + 1) {
        slots += 1;
    }
    slots
}

#[test]
fn slots_are_those_that_counting_gives() {
    let sizes = [1000, 1000, 1500];
    let layout = uniform(3, 16, 2, &sizes);
    for budget in (0..200_000).step_by(997) {
        let slots = counted(&sizes, 48, budget);
        match layout.plan(budget) {
            Ok(plan) => assert_eq!(u64::from(plan.groups[0].slots), slots, "{budget}"),
            Err(error) => {
                assert!(slots < 2, "{budget}: {error}");
                assert!(
                    error
                        .to_string()
                        .contains(&layout.least_bytes().to_string())
                );
            }
        }
    }
}

#[test]
fn the_bounds_of_sizes_are_tight() {
    let layout = small();
    let slots = |bytes| layout.plan(bytes).map(|plan| plan.groups[0].slots);
    let (least, full) = (layout.least_bytes(), layout.full_bytes());
    assert_eq!((least, full), (5 * 3 * MIB, 257 * 3 * MIB));
    assert_eq!((slots(least), slots(full)), (Ok(4), Ok(256)));
    assert!(slots(least - 1).is_err());
    assert_eq!(slots(full - 1), Ok(255));
    assert_eq!(slots(full * 4), Ok(256));
    assert!(matches!(
        Pool::new(&layout, 0).unwrap_err(),
        LayoutError::TooSmall { bytes: 0, .. }
    ));
    assert_eq!(layout.largest_bytes(), full);
}

#[test]
fn no_bank_is_larger_than_its_device_bears() {
    let device = DeviceLayout {
        most_bank_bytes: Some(100 * MIB),
        ..DEVICE
    };
    let layers = vec![layer(Some(0), &[MIB, 4 * MIB]); 8];
    let layout = PoolLayout::new(layers.clone(), vec![device]).unwrap();
    let largest = layout.largest_bytes();
    let plan = layout.plan(largest).unwrap();
    assert_eq!(plan.groups[0].largest_bank_bytes, 100 * MIB);
    let beyond = layout.plan(largest + 1).unwrap();
    assert!(beyond.groups[0].largest_bank_bytes > 100 * MIB);
    // Where not even a token's experts fit, there is no pool.
    let tiny = DeviceLayout {
        most_bank_bytes: Some(4 * MIB),
        ..DEVICE
    };
    assert_eq!(
        PoolLayout::new(layers, vec![tiny]).unwrap().largest_bytes(),
        0
    );
}

#[test]
fn a_probed_bound_on_slots_is_kept() {
    let mut layout = small();
    layout.bound_slots(3, 100);
    let plan = layout.plan(layout.largest_bytes()).unwrap();
    assert_eq!(plan.groups[0].slots, 100);
    layout.bound_slots(0, 3);
    assert_eq!(layout.largest_bytes(), 0, "less than one token's");
}

#[test]
fn layers_are_grouped_by_device_and_tensors() {
    let layers = vec![
        layer(Some(0), &[1000, 1000]),
        layer(None, &[1000, 1000]),
        layer(Some(1), &[1000, 1000]),
        layer(Some(0), &[1000, 2000]),
        layer(Some(0), &[1000, 1000]),
    ];
    let devices = vec![
        DeviceLayout {
            split: 3.0,
            ..DEVICE
        },
        DeviceLayout {
            split: 1.0,
            ..DEVICE
        },
    ];
    let mut layout = PoolLayout::new(layers, devices).unwrap();
    let plan = layout.plan(100_000).unwrap();
    let groups: Vec<_> = plan.groups.iter().map(|g| (g.device, g.layers)).collect();
    assert_eq!(groups, [(0, 2), (1, 1), (0, 1)]);
    assert_eq!(layout.host_bytes(), 16 * (2000 * 3 + 3000));
    // 75,000 bytes for 112,000 of experts on one, 25,000 for 32,000 on the other.
    let shares: Vec<f64> = plan
        .groups
        .iter()
        .map(|g| f64::from(g.slots) / f64::from(g.experts))
        .collect();
    assert!((shares[0] - shares[2]).abs() < 0.1, "{shares:?}");
    assert!(plan.device_bytes[0] <= 75_000 && plan.device_bytes[0] > 65_000);
    assert!(plan.device_bytes[1] <= 25_000 && plan.device_bytes[1] > 22_000);
    // A device that gets nothing caches nothing, and does not keep the others from it.
    layout.split(&[0.0, 1.0]);
    let plan = layout.plan(layout.full_bytes()).unwrap();
    let slots: Vec<_> = plan.groups.iter().map(|g| g.slots).collect();
    assert_eq!(slots, [0, 16, 0]);
    layout.split(&[0.0, 0.0]);
    let plan = layout.plan(100_000).unwrap();
    assert!(plan.groups.iter().all(|group| group.slots > 0), "evenly");
}

#[test]
fn each_device_keeps_to_its_own_memory() {
    let layers = vec![layer(Some(0), &[MIB]), layer(Some(1), &[MIB])];
    let layout = PoolLayout::new(layers, vec![DEVICE, DEVICE]).unwrap();
    let within = |budgets: [Option<u64>; 2]| {
        let bytes = layout.largest_within(&budgets);
        layout.device_bytes(Arrangement::Reload { pool_bytes: bytes })
    };
    assert_eq!(within([None, None]), [17 * MIB, 17 * MIB]);
    let bytes = within([Some(10 * MIB), Some(GIB)]);
    assert_eq!(
        bytes,
        [10 * MIB, 10 * MIB],
        "split evenly, so the narrower binds"
    );
    assert_eq!(layout.largest_within(&[Some(2 * MIB), None]), 0);
    assert_eq!(
        layout.largest_static_within(&[Some(20 * MIB), None]),
        32 * MIB
    );
    assert_eq!(
        layout.largest_static_within(&[Some(10 * MIB), None]),
        20 * MIB
    );
}

#[test]
fn static_layers_are_the_last_that_fit() {
    let layout = small();
    let one = 96 * MIB;
    assert_eq!(layout.static_layers(one - 1), Vec::<usize>::new());
    assert_eq!(layout.static_layers(3 * one), [5, 6, 7]);
    assert_eq!(layout.static_layers(100 * one).len(), 8);
    let placed = Arrangement::Static { bytes: 3 * one + 5 };
    assert_eq!(layout.device_bytes(placed), [3 * one]);
}

#[test]
fn layers_that_a_device_cannot_compute_with_are_never_placed() {
    // 16 experts of 3 bytes and of 1 byte; a tensor of 48 bytes is too large, one of 47 is not.
    let device = |most| DeviceLayout {
        most_bank_bytes: Some(most),
        ..DEVICE
    };
    let layers = || vec![layer(Some(0), &[1, 1]), layer(Some(0), &[1, 3])];
    let placed = |most| {
        let layout = PoolLayout::new(layers(), vec![device(most)]).unwrap();
        let all = layout.host_bytes();
        let bytes = layout.device_bytes(Arrangement::Static { bytes: all });
        (layout.static_layers(all), bytes)
    };
    assert_eq!(placed(48), (vec![0, 1], vec![96]));
    assert_eq!(placed(47), (vec![0], vec![32]));
    assert_eq!(placed(15), (vec![], vec![0]));
}

#[test]
fn what_is_no_layout_is_refused_by_name() {
    let refused = |layers, devices: Vec<DeviceLayout>| {
        PoolLayout::new(layers, devices).unwrap_err().to_string()
    };
    let none = refused(vec![layer(None, &[1])], vec![DEVICE]);
    assert!(none.contains("no MoE layer"), "{none}");
    let device = refused(vec![layer(Some(1), &[1])], vec![DEVICE]);
    assert!(device.contains("device Some(1) of 1"), "{device}");
    let empty = refused(vec![layer(Some(0), &[])], vec![DEVICE]);
    assert!(empty.contains("0 tensors"), "{empty}");
    let split = DeviceLayout {
        split: f64::NAN,
        ..DEVICE
    };
    assert!(refused(vec![layer(Some(0), &[1])], vec![split]).contains("split NaN"));
    let huge = LayerLayout {
        experts: 60_000,
        ..layer(Some(0), &[1 << 35; 4])
    };
    let huge = vec![huge; 200];
    assert!(refused(huge, vec![DEVICE]).contains("bytes of experts in all"));
}
