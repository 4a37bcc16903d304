use crate::plant::*;
use hotpin_controllers::*;
#[test]
fn dbg() {
    let mut config = AdaptiveConfig::default();
    config.value.give_back_idle = false;
    let mut plant = Plant::new(900 * MIB);
    let mut policy = Adaptive::new(&plant.shape, &config, None).unwrap();
    plant.tokens_per_tick = 0;
    plant.tick_ns = 500_000_000;
    plant.run(&mut policy, 5.0);
    plant.stall_fraction = 0.2;
    plant.reclaim_bytes_per_s = GIB;
    plant.run(&mut policy, 60.0);
    plant.stall_fraction = 0.0;
    plant.reclaim_bytes_per_s = 0;
    for i in 0..50 {
        plant.run(&mut policy, 1.0);
        println!(
            "{i} {} {:?} {:?}",
            plant.out.capacity_bytes / MIB,
            plant.out.ceilings,
            plant.out.binding
        );
    }
}
