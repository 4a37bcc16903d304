//! The model map on small files: sound, unusual, broken and hostile ones.

use crate::gguf_writer::*;
use hotpin::model::{Fit, Inspection, Memory, ModelMap, Role, TensorKind};
use hotpin_controllers::ExpertId;
use proptest::prelude::*;
use std::path::Path;
use tempfile::TempDir;

fn dir() -> TempDir {
    tempfile::tempdir().unwrap()
}

fn open(model: &Gguf) -> (TempDir, ModelMap) {
    let dir = dir();
    let map = ModelMap::open(&model.write(dir.path(), "m.gguf")).unwrap();
    check_invariants(&map);
    (dir, map)
}

/// The error for a file, which must name the file and contain `words`.
fn refused(bytes: &[u8], words: &str) -> String {
    let dir = dir();
    let path = dir.path().join("m.gguf");
    std::fs::write(&path, bytes).unwrap();
    refused_at(&path, words)
}

fn refused_at(path: &Path, words: &str) -> String {
    let text = ModelMap::open(path).expect_err(words).to_string();
    assert!(text.contains(words), "expected '{words}' in: {text}");
    assert!(
        text.contains(path.parent().unwrap().to_str().unwrap()),
        "no path in: {text}"
    );
    text
}

/// What holds for every map: slices and ranges lie within their files, do not overlap, and add up.
fn check_invariants(map: &ModelMap) {
    let mut pieces: Vec<(u32, u64, u64)> = Vec::new();
    let mut expert_bytes = 0;
    for index in 0..map.shape().total_experts() {
        let id = ExpertId(u32::try_from(index).unwrap());
        let slices = map.expert_slices(id);
        assert_eq!(
            slices.iter().map(|slice| slice.len).sum::<u64>(),
            map.shape().bytes(id)
        );
        for slice in slices {
            assert_eq!(map.tensors()[slice.tensor as usize].shard, slice.shard);
            expert_bytes += slice.len;
            pieces.push((slice.shard, slice.offset, slice.len));
        }
    }
    assert_eq!(expert_bytes, map.expert_bytes());
    let total: u64 = map.tensors().iter().map(|tensor| tensor.info.bytes).sum();
    assert_eq!(total, map.total_bytes());
    assert!(map.token_cycle_bytes() <= map.expert_bytes());
    let ranges = map.dense_ranges().iter().chain(map.idle_ranges());
    let covered: u64 = ranges.clone().map(|range| range.len).sum();
    assert!(covered >= map.dense_bytes() + map.idle_bytes());
    pieces.extend(ranges.map(|range| (range.shard, range.offset, range.len)));
    pieces.sort_unstable();
    for pair in pieces.windows(2) {
        assert!(
            pair[0].0 < pair[1].0 || pair[0].1 + pair[0].2 <= pair[1].1,
            "overlap: {pair:?}"
        );
    }
    for (shard, offset, len) in pieces {
        let shard = &map.shards()[shard as usize];
        assert!(offset >= shard.data_offset && offset + len <= shard.file_bytes);
    }
    assert!(map.expert_slices(ExpertId(u32::MAX)).is_empty());
}

/// Every byte of every slice is the one that the writer filled that expert with.
fn check_contents(map: &ModelMap, tags: &[u8]) {
    for index in 0..map.shape().total_experts() {
        let id = ExpertId(u32::try_from(index).unwrap());
        let (_, expert) = map.shape().place(id);
        assert_eq!(map.expert_slices(id).len(), tags.len());
        for (slice, tag) in map.expert_slices(id).iter().zip(tags) {
            let file = std::fs::read(&map.shards()[slice.shard as usize].path).unwrap();
            let start = usize::try_from(slice.offset).unwrap();
            let bytes = &file[start..start + usize::try_from(slice.len).unwrap()];
            let expected = tag.wrapping_add(expert.to_le_bytes()[0]);
            assert!(
                bytes.iter().all(|&byte| byte == expected),
                "{id:?} {slice:?} {tag:#x}"
            );
        }
    }
}

#[test]
fn separate_gate_up_down() {
    let (_dir, map) = open(&moe(3, 1, 8, 2));
    assert_eq!(
        (map.architecture(), map.name(), map.block_count()),
        ("testmoe", "Test MoE", 3)
    );
    assert!(map.is_moe());
    assert_eq!(
        map.layers()
            .iter()
            .map(|layer| layer.block)
            .collect::<Vec<_>>(),
        [1, 2]
    );
    assert_eq!(
        (map.layer_of_block(0), map.layer_of_block(2)),
        (None, Some(1))
    );
    let slices = [64 * 32 / 32 * 18, 64 * 32 / 32 * 18, 32 * 64 / 32 * 34];
    let expert: u64 = slices.iter().sum();
    assert_eq!(map.shape().layer_expert_bytes(0), expert);
    assert_eq!(map.token_cycle_bytes(), 2 * 2 * expert);
    assert_eq!(map.expert_bytes(), 2 * 8 * expert);
    let roles: Vec<Role> = map.layers()[0].parts.iter().map(|part| part.role).collect();
    assert_eq!(roles, [Role::Gate, Role::Up, Role::Down]);
    check_contents(&map, &[0x10, 0x40, 0x80]);
    assert_eq!(
        map.tensor("blk.1.ffn_up_exps.weight").unwrap().kind,
        TensorKind::Expert
    );
    assert!(map.tensor("blk.0.ffn_up_exps.weight").is_none());
    // Dense weights between the experts: start to first experts, then the next block's, then the end.
    assert_eq!(map.dense_ranges().len(), 3);
}

#[test]
fn fused_gate_up_with_biases_and_scales() {
    let model = Gguf::model("fused", "Fused", 1)
        .u32("fused.expert_count", 4)
        .u32("fused.expert_used_count", 1)
        .experts("blk.0.ffn_down_exps.bias", &[1024, 4], F32, 0xb0)
        .experts("blk.0.ffn_down_exps.weight", &[32, 64, 4], MXFP4, 0x80)
        .experts("blk.0.ffn_gate_up_exps.weight", &[64, 64, 4], MXFP4, 0x20)
        .experts("blk.0.ffn_down_exps.scale", &[4], F32, 0xc0)
        .tensor("blk.0.ffn_gate_inp.weight", &[64, 4], F32);
    let (_dir, map) = open(&model);
    let parts: Vec<(Role, bool, u64)> = map.layers()[0]
        .parts
        .iter()
        .map(|part| (part.role, part.weight, part.slice_bytes))
        .collect();
    assert_eq!(
        parts,
        [
            (Role::GateUp, true, 64 * 64 / 32 * 17),
            (Role::Down, true, 64 * 17),
            (Role::Down, false, 4096)
        ]
    );
    check_contents(&map, &[0x20, 0x80, 0xb0]);
    // Four bytes an expert are not worth a page each.
    assert_eq!(
        map.tensor("blk.0.ffn_down_exps.scale").unwrap().kind,
        TensorKind::Dense
    );
}

#[test]
fn per_layer_counts_and_odd_alignment() {
    let mut model = Gguf::model("lists", "Lists", 3)
        .u32s("lists.expert_count", &[0, 4, 2])
        .u32s("lists.expert_used_count", &[0, 2, 1])
        .alignment(64)
        .version(2);
    for (block, experts) in [(1, 4), (2, 2)] {
        model = model
            .experts(
                &format!("blk.{block}.ffn_up_exps.weight"),
                &[32, 3, experts],
                Q8_0,
                1,
            )
            .experts(
                &format!("blk.{block}.ffn_down_exps.weight"),
                &[32, 5, experts],
                Q8_0,
                9,
            );
    }
    let (_dir, map) = open(&model);
    assert_eq!(
        (map.shape().experts_in(0), map.shape().experts_in(1)),
        (4, 2)
    );
    assert_eq!((map.shape().top_k_in(0), map.shape().top_k_in(1)), (2, 1));
    check_contents(&map, &[1, 9]);
    let short = Gguf::model("lists", "Lists", 3)
        .u32s("lists.expert_count", &[4])
        .u32s("lists.expert_used_count", &[2])
        .experts("blk.1.ffn_up_exps.weight", &[32, 3, 4], Q8_0, 1);
    refused(&short.build(), "'lists.expert_count' ends before block 1");
}

#[test]
fn blocks_for_multi_token_prediction_are_idle() {
    let (_dir, map) = open(&moe(3, 0, 4, 1).u32("testmoe.nextn_predict_layers", 1));
    assert_eq!((map.layers().len(), map.block_count()), (2, 2));
    let idle = map
        .tensors()
        .iter()
        .filter(|tensor| tensor.info.name.starts_with("blk.2."));
    assert_eq!(
        idle.map(|tensor| tensor.info.bytes).sum::<u64>(),
        map.idle_bytes()
    );
    assert!(map.idle_bytes() > 0 && map.idle_ranges().len() == 1);
}

#[test]
fn a_dense_model_has_a_map_and_nothing_to_pin() {
    let model = Gguf::model("llama", "", 1)
        .tensor("token_embd.weight", &[32, 4], F32)
        .tensor("blk.0.ffn_up.weight", &[32, 4], F32);
    let (_dir, map) = open(&model);
    assert!(!map.is_moe());
    assert_eq!(map.name(), "m", "an empty name gives way to the file's");
    assert_eq!(
        (map.shape().layers(), map.expert_bytes(), map.dense_bytes()),
        (0, 0, 1024)
    );
    let memory = Memory {
        available_bytes: 1 << 30,
        reserve_bytes: 0,
    };
    let report = Inspection::new(&map, Some(memory));
    assert_eq!(report.fit.as_ref().unwrap().verdict, Fit::Dense);
    assert!(report.to_string().contains("nothing to pin"), "{report}");
}

#[test]
fn inspection_as_text_and_json() {
    let (_dir, map) = open(&moe(3, 1, 8, 2));
    let memory = Memory {
        available_bytes: 60_000,
        reserve_bytes: 1000,
    };
    let report = Inspection::new(&map, Some(memory));
    let text = report.to_string();
    for words in [
        "Test MoE (testmoe)",
        "3, of which 2 MoE",
        "8 a layer, 16 in all",
        "4.38 KiB",
    ] {
        assert!(text.contains(words), "no '{words}' in:\n{text}");
    }
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(json["bytes_per_expert"]["min"], 4480);
    assert_eq!(json["token_cycle_bytes"], 4 * 4480);
    assert_eq!(json["fit"]["verdict"], "control");
    assert_eq!(json["fit"]["usable_bytes"], 59_000);
    assert_eq!(json["types"][0]["type"], "q8_0");
    assert!(
        Inspection::new(&map, None)
            .to_string()
            .contains("not known")
    );
}

/// Shards 1 to 3 of one model, in `dir`.
fn write_shards(dir: &Path) -> Vec<std::path::PathBuf> {
    let tail = |number: u16| Gguf::new().u16("split.no", number).u16("split.count", 3);
    let shards = [
        Gguf::model("testmoe", "Test MoE", 1)
            .u32("testmoe.expert_count", 4)
            .u32("testmoe.expert_used_count", 2)
            .u16("split.no", 0)
            .u16("split.count", 3)
            .raw("split.tensors.count", I32, &4i32.to_le_bytes())
            .tensor("token_embd.weight", &[64, 10], F16)
            .experts("blk.0.ffn_gate_exps.weight", &[64, 32, 4], Q4_0, 0x10),
        tail(1).experts("blk.0.ffn_up_exps.weight", &[64, 32, 4], Q4_0, 0x40),
        tail(2).experts("blk.0.ffn_down_exps.weight", &[32, 64, 4], Q8_0, 0x80),
    ];
    let names = (1..=3).map(|number| format!("m-{number:05}-of-00003.gguf"));
    shards
        .iter()
        .zip(names)
        .map(|(shard, name)| shard.write(dir, &name))
        .collect()
}

fn merged() -> Gguf {
    Gguf::model("testmoe", "Test MoE", 1)
        .u32("testmoe.expert_count", 4)
        .u32("testmoe.expert_used_count", 2)
        .tensor("token_embd.weight", &[64, 10], F16)
        .experts("blk.0.ffn_down_exps.weight", &[32, 64, 4], Q8_0, 0x80)
        .experts("blk.0.ffn_gate_exps.weight", &[64, 32, 4], Q4_0, 0x10)
        .experts("blk.0.ffn_up_exps.weight", &[64, 32, 4], Q4_0, 0x40)
}

#[test]
fn shards_are_joined_and_the_fingerprint_ignores_the_split() {
    let dir = dir();
    let map = ModelMap::open(&write_shards(dir.path())[0]).unwrap();
    check_invariants(&map);
    assert_eq!(map.shards().len(), 3);
    check_contents(&map, &[0x10, 0x40, 0x80]);
    let (_dir, whole) = open(&merged());
    assert_eq!(map.fingerprint(), whole.fingerprint());
    assert_eq!(map.fingerprint().len(), 64);
    let (_dir, other) = open(&merged().tensor("output.weight", &[64], F32));
    assert_ne!(whole.fingerprint(), other.fingerprint());
}

#[test]
fn shards_behind_symbolic_links() {
    use std::os::unix::fs::symlink;
    let real = dir();
    let shards = write_shards(real.path());
    // One link to the first shard, under another name: the siblings lie beside what it points to.
    let links = dir();
    let link = links.path().join("model.gguf");
    symlink(&shards[0], &link).unwrap();
    let map = ModelMap::open(&link).unwrap();
    assert_eq!(
        (map.shards().len(), map.path()),
        (3, std::fs::canonicalize(&shards[0]).unwrap().as_path())
    );
    // Links to blobs without telling names: the siblings lie beside the links.
    let blobs = dir();
    for (index, shard) in shards.iter().enumerate() {
        let blob = blobs.path().join(format!("blob{index}"));
        std::fs::rename(shard, &blob).unwrap();
        symlink(&blob, links.path().join(shard.file_name().unwrap())).unwrap();
    }
    let first = links.path().join("m-00001-of-00003.gguf");
    let map = ModelMap::open(&first).unwrap();
    assert_eq!(map.path(), first);
    check_contents(&map, &[0x10, 0x40, 0x80]);
}

#[test]
fn wrong_shards_are_refused_by_name() {
    let fresh = || {
        let dir = dir();
        let shards = write_shards(dir.path());
        (dir, shards)
    };
    let (_dir, shards) = fresh();
    let text = refused_at(&shards[1], "this is shard 2 of 3; pass the first shard");
    assert!(text.contains(shards[0].to_str().unwrap()), "{text}");

    std::fs::remove_file(&shards[2]).unwrap();
    refused_at(&shards[0], "shard 3 of 3 is missing");

    let (dir, shards) = fresh();
    let spare = dir.path().join("spare");
    std::fs::rename(&shards[1], &spare).unwrap();
    std::fs::rename(&shards[2], &shards[1]).unwrap();
    std::fs::rename(&spare, &shards[2]).unwrap();
    refused_at(
        &shards[0],
        "expected shard 2 of 3 by its name, but its header says shard 3",
    );

    let (_dir, shards) = fresh();
    std::fs::remove_file(&shards[2]).unwrap();
    std::os::unix::fs::symlink(&shards[0], &shards[2]).unwrap();
    refused_at(&shards[0], "it is the same file as");

    let (dir, shards) = fresh();
    let renamed = dir.path().join("renamed.gguf");
    std::fs::rename(&shards[0], &renamed).unwrap();
    refused_at(&renamed, "the name does not end in -00001-of-00003.gguf");

    let (dir, shards) = fresh();
    let other = Gguf::model("testmoe", "Another", 1)
        .u16("split.no", 1)
        .u16("split.count", 3);
    other.write(dir.path(), "m-00002-of-00003.gguf");
    refused_at(&shards[0], "general.name is 'Another'");
    Gguf::new()
        .u16("split.no", 1)
        .u16("split.count", 3)
        .tensor("token_embd.weight", &[32], F32)
        .write(dir.path(), "m-00002-of-00003.gguf");
    refused_at(&shards[0], "'token_embd.weight' appears twice");
    Gguf::new()
        .u16("split.no", 1)
        .u16("split.count", 4)
        .write(dir.path(), "m-00002-of-00003.gguf");
    refused_at(&shards[0], "says that there are 4 shards");
    Gguf::new()
        .u16("split.no", 1)
        .u16("split.count", 3)
        .write(dir.path(), "m-00002-of-00003.gguf");
    refused_at(&shards[0], "hold 4 tensors, but they hold 3");
}

#[test]
fn files_that_are_not_models() {
    let dir = dir();
    refused_at(&dir.path().join("absent.gguf"), "cannot open the model");
    let sub = dir.path().join("sub");
    std::fs::create_dir(&sub).unwrap();
    refused_at(&sub, "directory, not a model file");
    refused(b"", "an empty file");
    refused(b"GG", "less than 4 bytes");
    refused(b"PK\x03\x04 and so on", "a zip archive");
    refused(b"version https://git-lfs.github.com/spec/v1", "Git LFS");
    refused(b"<!DOCTYPE html>", "a web page");
    refused(b"\x80\0\0\0\0\0\0\0{\"a\":1}", "something else");
    refused(b"GGUF", "truncated");
    refused(b"GGUF\x01\0\0\0", "version 1");
    refused(b"GGUF\0\0\0\x03", "big-endian");
    refused(b"GGUF\x09\0\0\0", "version 9");
    refused(&Gguf::new().build(), "no 'general.architecture'");
}

#[test]
fn a_truncated_file_states_both_sizes() {
    let whole = moe(2, 0, 4, 2).build();
    let text = refused(&whole[..whole.len() - 1], "truncated");
    assert!(
        text.contains(&format!("at least {} bytes", whole.len())),
        "{text}"
    );
    assert!(
        text.contains(&format!("it has {}", whole.len() - 1)),
        "{text}"
    );
}

#[test]
fn metadata_and_experts_must_agree() {
    let with = |experts: u32, top_k: u32| {
        Gguf::model("a", "a", 2)
            .u32("a.expert_count", experts)
            .u32("a.expert_used_count", top_k)
            .experts("blk.0.ffn_up_exps.weight", &[32, 2, 4], Q8_0, 0)
            .experts("blk.0.ffn_down_exps.weight", &[32, 2, 4], Q8_0, 0)
            .build()
    };
    refused(&with(5, 2), "does not hold 5 experts");
    refused(&with(4, 5), "routes to 5 of 4 experts");
    refused(&with(0, 1), "'a.expert_count' is 0");
    refused(&with(4, 0), "'a.expert_used_count' is 0");
    refused(&with(u32::MAX, 1), "not within 1 to");
    let up = |model: Gguf, block: u32| {
        model.experts(
            &format!("blk.{block}.ffn_up_exps.weight"),
            &[32, 2, 4],
            Q8_0,
            0,
        )
    };
    let model = || {
        Gguf::model("a", "a", 2)
            .u32("a.expert_count", 4)
            .u32("a.expert_used_count", 1)
    };
    refused(
        &up(Gguf::model("a", "a", 2), 0).build(),
        "there is no 'a.expert_count'",
    );
    refused(&up(model(), 0).build(), "no ffn_down_exps");
    refused(&up(model(), 2).build(), "beyond the model's last block");
    refused(&model().build(), "no tensor holds experts");
    refused(
        &model()
            .tensor("blk.0.ffn_gate.3.weight", &[32], F32)
            .build(),
        "no longer reads",
    );
    refused(
        &Gguf::model("a", "a", u32::MAX).build(),
        "'block_count' is 4294967295",
    );
    refused(
        &Gguf::model("a", "a", 1)
            .text("a.expert_count", "many")
            .build(),
        "the text 'many'",
    );
}

#[test]
fn hostile_headers() {
    let max = u64::MAX.to_le_bytes();
    let header = |tensors: u64, keys: u64| {
        [
            &b"GGUF\x03\0\0\0"[..],
            &tensors.to_le_bytes(),
            &keys.to_le_bytes(),
        ]
        .concat()
    };
    refused(&header(u64::MAX, 1), "tensor count is 18446744073709551615");
    refused(
        &header(0, u64::MAX),
        "metadata count is 18446744073709551615",
    );
    refused(&header(30_000, 0), "truncated");
    refused(
        &[&header(0, 1)[..], &max, &[0; 64]].concat(),
        "length of a metadata key is",
    );
    let value = |ty: u32, raw: &[u8]| Gguf::new().raw("general.name", ty, raw).build();
    refused(&value(TEXT, &max), "truncated");
    refused(&value(99, &[]), "metadata type 99");
    for element in [U8, U32, U64, TEXT, 6] {
        refused(
            &value(ARRAY, &[&element.to_le_bytes()[..], &max].concat()),
            "truncated",
        );
    }
    let mut nested = Vec::new();
    for _ in 0..100_000 {
        nested.extend(ARRAY.to_le_bytes());
        nested.extend(1u64.to_le_bytes());
    }
    refused(&value(ARRAY, &nested), "an array of arrays");
    refused(&Gguf::new().alignment(0).build(), "not a power of two");
    refused(&Gguf::new().alignment(48).build(), "not a power of two");
    refused(
        &Gguf::new().alignment(1 << 31).build(),
        "general.alignment is 2147483648",
    );
    refused(
        &Gguf::new()
            .text("general.name", "a")
            .text("general.name", "b")
            .build(),
        "appears twice",
    );
    refused(&Gguf::new().text("", "a").build(), "is empty");
}

#[test]
fn hostile_tensor_tables() {
    let table = |name: &str, dims: &[u64], ty: u32, offset: u64| {
        let mut out = [
            &b"GGUF\x03\0\0\0"[..],
            &1u64.to_le_bytes(),
            &0u64.to_le_bytes(),
        ]
        .concat();
        text(&mut out, name);
        out.extend(u32::try_from(dims.len()).unwrap().to_le_bytes());
        out.extend(dims.iter().flat_map(|dim| dim.to_le_bytes()));
        out.extend(ty.to_le_bytes());
        out.extend(offset.to_le_bytes());
        out
    };
    refused(
        &table("t", &[1 << 40, 1 << 40], 0, 0),
        "cannot have the shape",
    );
    refused(&table("t", &[u64::MAX], 0, 0), "cannot have the shape");
    refused(&table("t", &[33], 8, 0), "cannot have the shape");
    refused(&table("t", &[1 << 60], 0, 0), "truncated");
    refused(
        &table("t", &[1; 5], 0, 0),
        "dimension count of tensor 't' is 5",
    );
    refused(
        &table("t", &[32], 77, 0),
        "tensor 't' has type 77, which is not known here",
    );
    refused(&table("t", &[32], 31, 0), "q4_0_4_4");
    refused(&table("t", &[32], 0, 32), "at data offset 32, expected 0");
    refused(&table("t", &[32], 0, u64::MAX), "expected 0");
    refused(&table("t\n", &[32], 0, 0), "not printable");
    refused(
        &table(&"n".repeat(128), &[32], 0, 0),
        "the length of a tensor name is 128",
    );
}

fn models() -> Vec<Vec<u8>> {
    let lists = Gguf::model("l", "l", 2)
        .u32s("l.expert_count", &[2, 2])
        .u32s("l.expert_used_count", &[1, 1])
        .experts("blk.0.ffn_gate_up_exps.weight", &[32, 2, 2], Q8_0, 0)
        .experts("blk.0.ffn_down_exps.weight", &[32, 2, 2], Q8_0, 0)
        .experts("blk.0.ffn_down_exps.bias", &[1024, 2], F32, 0);
    vec![
        moe(2, 1, 4, 2).build(),
        lists.build(),
        merged().alignment(128).build(),
    ]
}

fn open_bytes(dir: &Path, bytes: &[u8]) {
    let path = dir.join("m.gguf");
    std::fs::write(&path, bytes).unwrap();
    check_answer(&path);
}

/// Opening answers with a sound map or an error; it never panics.
fn check_answer(path: &Path) {
    match ModelMap::open(path) {
        Ok(map) => check_invariants(&map),
        Err(error) => assert!(!error.to_string().chars().any(char::is_control), "{error}"),
    }
}

#[test]
fn every_truncation_is_refused() {
    let dir = dir();
    for whole in models() {
        // All of the header, then places in the data, the last byte among them.
        let data = (1500..whole.len()).rev().step_by(97);
        for len in (0..whole.len().min(1500)).chain(data) {
            let path = dir.path().join("m.gguf");
            std::fs::write(&path, &whole[..len]).unwrap();
            assert!(
                ModelMap::open(&path).is_err(),
                "{len} of {} bytes",
                whole.len()
            );
        }
    }
}

#[test]
fn every_header_byte_may_be_anything() {
    use std::os::unix::fs::FileExt;
    let dir = dir();
    let path = dir.path().join("m.gguf");
    for whole in models() {
        std::fs::write(&path, &whole).unwrap();
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        // Tensor data is never read, so only the first part matters.
        for at in 0..whole.len().min(1500) {
            for byte in [0, 0x7f, 0xff, whole[at] ^ 1, whole[at] ^ 0x80] {
                file.write_all_at(&[byte], at as u64).unwrap();
                check_answer(&path);
            }
            file.write_all_at(&whole[at..=at], at as u64).unwrap();
        }
    }
}

#[derive(Clone, Debug)]
enum Damage {
    Truncate,
    Set(u8),
    Insert(Vec<u8>),
    Remove(usize),
    Number(u64),
    Copy(usize, usize),
}

fn damage() -> impl Strategy<Value = Damage> {
    let hostile = prop_oneof![
        Just(u64::MAX),
        Just(1 << 63),
        Just(1 << 62),
        Just((1 << 32) - 1),
        Just(0),
        any::<u64>(),
        0u64..5000
    ];
    prop_oneof![
        1 => Just(Damage::Truncate),
        4 => any::<u8>().prop_map(Damage::Set),
        2 => prop::collection::vec(any::<u8>(), 1..40).prop_map(Damage::Insert),
        2 => (1usize..40).prop_map(Damage::Remove),
        4 => hostile.prop_map(Damage::Number),
        2 => (any::<usize>(), 1usize..64).prop_map(|(from, len)| Damage::Copy(from, len)),
    ]
}

fn apply(bytes: &mut Vec<u8>, at: usize, damage: &Damage) {
    // Half of the damage goes where the header is.
    let reach = if at.is_multiple_of(2) {
        bytes.len()
    } else {
        bytes.len().min(1200)
    };
    let at = if reach == 0 { 0 } else { (at / 2) % reach };
    match damage {
        Damage::Truncate => bytes.truncate(at),
        Damage::Set(byte) => bytes.iter_mut().skip(at).take(1).for_each(|b| *b = *byte),
        Damage::Insert(new) => drop(bytes.splice(at..at, new.iter().copied())),
        Damage::Remove(len) => drop(bytes.drain(at..bytes.len().min(at + len))),
        Damage::Number(n) => {
            bytes
                .iter_mut()
                .skip(at)
                .zip(n.to_le_bytes())
                .for_each(|(b, new)| *b = new);
        }
        Damage::Copy(from, len) => {
            let from = if bytes.is_empty() {
                0
            } else {
                from % bytes.len()
            };
            let piece = bytes[from..bytes.len().min(from + len)].to_vec();
            bytes
                .iter_mut()
                .skip(at)
                .zip(piece)
                .for_each(|(b, new)| *b = new);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn damaged_files_never_panic(
        which in 0usize..3,
        hits in prop::collection::vec((any::<usize>(), damage()), 1..6),
    ) {
        let mut bytes = models().swap_remove(which);
        for (at, damage) in &hits {
            apply(&mut bytes, *at, damage);
        }
        let dir = dir();
        open_bytes(dir.path(), &bytes);
    }

    #[test]
    fn shards_with_a_damaged_one_never_panic(
        which in 0usize..3,
        at: usize,
        damage in damage(),
    ) {
        let dir = dir();
        let shards = write_shards(dir.path());
        let mut bytes = std::fs::read(&shards[which]).unwrap();
        apply(&mut bytes, at, &damage);
        std::fs::write(&shards[which], bytes).unwrap();
        if let Ok(map) = ModelMap::open(&shards[0]) {
            check_invariants(&map);
        }
    }

    #[test]
    fn noise_after_the_magic_never_panics(noise in prop::collection::vec(any::<u8>(), 0..400)) {
        let dir = dir();
        open_bytes(dir.path(), &[&b"GGUF\x03\0\0\0"[..], &noise].concat());
    }
}
