//! Checkpoints: any layout in, any range out; nothing half-written or damaged is ever loaded.

use proptest::prelude::*;
use std::fs;
use std::path::{Path, PathBuf};
use zrt::checkpoint::{self, BaseId, Check, Error, KINDS, Kind, Manifest, Param, Reader, ShardWriter};

fn params(sizes: &[usize]) -> Vec<Param> {
    sizes.iter().enumerate().map(|(i, n)| Param { name: format!("p{i}"), shape: vec![*n] }).collect()
}

fn manifest(step: u64, ranks: usize, params: Vec<Param>) -> Manifest {
    Manifest {
        format: 0,
        step,
        optimizer_steps: step,
        ranks,
        files: Vec::new(),
        params,
        cursor: serde_json::json!({"epoch": 1, "sample": 17}),
        seed: 42,
        base: BaseId { config: "c".into(), weights: "w".into() },
        config_hash: "h".into(),
        extra: serde_json::json!({"loss": 0.1}),
    }
}

/// A value that says where it belongs.
fn value(kind: Kind, param: usize, element: usize) -> f32 {
    (kind as usize * 7_000_000 + param * 600_000 + element) as f32
}

fn values(kind: Kind, param: usize, start: usize, elems: usize) -> Vec<f32> {
    (start..start + elems).map(|e| value(kind, param, e)).collect()
}

/// Writes a whole checkpoint; `owner` cuts each parameter at the given points, pieces go to ranks in turn.
fn write(run: &Path, step: u64, ranks: usize, sizes: &[usize], cuts: &[usize]) -> PathBuf {
    let tmp = checkpoint::tmp_dir(run, step, "n");
    let mut writers: Vec<ShardWriter> = (0..ranks).map(|r| ShardWriter::create(&tmp, r).unwrap()).collect();
    let mut turn = 0;
    for kind in KINDS {
        for (p, n) in sizes.iter().enumerate() {
            let mut ends: Vec<usize> = cuts.iter().map(|c| c % (n + 1)).chain([0, *n]).collect();
            ends.sort_unstable();
            for pair in ends.windows(2) {
                writers[turn % ranks].write(kind, &format!("p{p}"), pair[0], &values(kind, p, pair[0], pair[1] - pair[0])).unwrap();
                turn += 1;
            }
        }
    }
    for w in writers {
        w.finish().unwrap();
    }
    let dir = checkpoint::step_dir(run, step);
    checkpoint::commit(&tmp, manifest(step, ranks, params(sizes)), &dir).unwrap();
    dir
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    /// Written by any number of ranks cut anywhere, any range reads back, whatever it crosses.
    #[test]
    fn any_layout_reads_as_any_other(ranks in 1usize..6, sizes in prop::collection::vec(1usize..3000, 1..5), cuts in prop::collection::vec(any::<usize>(), 0..6),
                                     ranges in prop::collection::vec(any::<(prop::sample::Index, prop::sample::Index)>(), 8)) {
        let run = tempfile::tempdir().unwrap();
        let reader = Reader::open(&write(run.path(), 3, ranks, &sizes, &cuts)).unwrap();
        reader.verify().unwrap();
        for (i, (a, b)) in ranges.iter().enumerate() {
            let (kind, p) = (KINDS[i % 3], i % sizes.len());
            let (a, b) = (a.index(sizes[p] + 1), b.index(sizes[p] + 1));
            let (a, b) = (a.min(b), a.max(b));
            let mut got = vec![0f32; b - a];
            reader.read(kind, &format!("p{p}"), a, &mut got).unwrap();
            prop_assert_eq!(got, values(kind, p, a, b - a));
        }
        prop_assert!(reader.read(Kind::M, "p0", 1, &mut vec![0f32; sizes[0]]).is_err());
        let absent = matches!(reader.read(Kind::M, "absent", 0, &mut [0.0]), Err(Error::NoParam { .. }));
        prop_assert!(absent);
    }
}

/// Several blocks per file, read in parallel, in both orders.
#[test]
fn ranges_cross_blocks() {
    let run = tempfile::tempdir().unwrap();
    let sizes = [600_000, 10, 500_001];
    let reader = Reader::open(&write(run.path(), 1, 2, &sizes, &[123_457, 262_144])).unwrap();
    std::thread::scope(|s| {
        for kind in KINDS {
            let reader = &reader;
            s.spawn(move || {
                for start in [0, 262_143, 262_144, 499_000, 1] {
                    let mut got = vec![0f32; 1000];
                    reader.read(kind, "p2", start, &mut got).unwrap();
                    assert_eq!(got, values(kind, 2, start, 1000));
                }
            });
        }
    });
    assert_eq!(reader.manifest().cursor["sample"], 17);
}

/// A run that dies after any number of writes leaves what was there, and the next start sweeps the rest.
#[test]
fn dying_at_every_step_leaves_the_previous_checkpoint() {
    let sizes = [100, 7];
    for death in 0..16 {
        let run = tempfile::tempdir().unwrap();
        write(run.path(), 1, 2, &sizes, &[]);
        let tmp = checkpoint::tmp_dir(run.path(), 2, "dead");
        let mut at = 0;
        // A process that is killed runs no destructors: forget stands for that.
        let mut dies = |w: Vec<ShardWriter>| {
            at += 1;
            if at > death {
                w.into_iter().for_each(std::mem::forget);
                None
            } else {
                Some(w)
            }
        };
        let attempt = || -> Option<()> {
            let mut w = dies(vec![ShardWriter::create(&tmp, 0).unwrap()])?;
            w.push(ShardWriter::create(&tmp, 1).unwrap());
            for kind in KINDS {
                for p in 0..2 {
                    w = dies(w)?;
                    w[p].write(kind, &format!("p{p}"), 0, &values(kind, p, 0, sizes[p])).unwrap();
                }
            }
            while !w.is_empty() {
                w = dies(w)?;
                w.remove(0).finish().unwrap();
            }
            dies(w)?;
            checkpoint::commit(&tmp, manifest(2, 2, params(&sizes)), &checkpoint::step_dir(run.path(), 2)).unwrap();
            Some(())
        };
        let finished = { attempt }().is_some();
        let found = checkpoint::latest(run.path(), Check::Full).unwrap();
        assert_eq!(found.found.unwrap().manifest().step, if finished { 2 } else { 1 }, "death {death}");
        assert!(found.skipped.is_empty());
        assert_eq!(checkpoint::sweep(run.path()).len(), usize::from(!finished));
        assert!(fs::read_dir(run.path()).unwrap().all(|e| e.unwrap().file_name().to_string_lossy().starts_with("step-")));
    }
}

/// Every file cut short or with one bit changed anywhere: skipped with a reason, the one before is found.
#[test]
fn truncation_and_flipped_bits_are_found() {
    let run = tempfile::tempdir().unwrap();
    write(run.path(), 1, 2, &[50], &[20]);
    let dir = write(run.path(), 2, 2, &[50], &[20]);
    let names: Vec<PathBuf> = fs::read_dir(&dir).unwrap().map(|e| e.unwrap().path()).collect();
    assert_eq!(names.len(), 5);
    for path in names {
        let good = fs::read(&path).unwrap();
        let check = |bytes: &[u8], what: &str| {
            fs::write(&path, bytes).unwrap();
            let found = checkpoint::latest(run.path(), Check::Full).unwrap();
            assert_eq!(found.found.unwrap().manifest().step, 1, "{}: {what}", path.display());
            assert!(found.skipped[0].1.to_string().contains("step-00000002"));
        };
        check(&good[..good.len() - 1], "cut");
        check(&[], "emptied");
        if path.extension().is_some_and(|e| e == "bin") || path.file_name().is_some_and(|n| n.to_string_lossy().starts_with("rank")) {
            for at in (0..good.len()).step_by(good.len() / 23) {
                let mut bad = good.clone();
                bad[at] ^= 4;
                check(&bad, "flipped");
            }
        }
        fs::remove_file(&path).unwrap();
        let found = checkpoint::latest(run.path(), Check::Sizes).unwrap();
        assert_eq!(found.found.unwrap().manifest().step, 1);
        fs::write(&path, &good).unwrap();
        assert_eq!(checkpoint::latest(run.path(), Check::Full).unwrap().found.unwrap().manifest().step, 2);
    }
    // Without the full check a flipped bit is still an error when it is read.
    let data = dir.join("rank-00000.bin");
    let mut bytes = fs::read(&data).unwrap();
    bytes[0] ^= 1;
    fs::write(&data, bytes).unwrap();
    let reader = Reader::open(&dir).unwrap();
    let results: Vec<bool> = KINDS.iter().map(|k| reader.read(*k, "p0", 0, &mut [0.0; 50]).is_err()).collect();
    assert!(results.contains(&true));
}

#[test]
fn commit_refuses_gaps_copies_and_strangers() {
    let run = tempfile::tempdir().unwrap();
    let try_pieces = |pieces: &[(&str, usize, usize)]| {
        let tmp = checkpoint::tmp_dir(run.path(), 5, "x");
        let mut w = ShardWriter::create(&tmp, 0).unwrap();
        for kind in KINDS {
            for (name, start, n) in pieces {
                w.write(kind, name, *start, &vec![0.0; *n]).unwrap();
            }
        }
        w.finish().unwrap();
        let e = checkpoint::commit(&tmp, manifest(5, 1, params(&[10])), &checkpoint::step_dir(run.path(), 5)).unwrap_err();
        assert!(fs::read_dir(run.path()).unwrap().next().is_none());
        e.to_string()
    };
    assert!(try_pieces(&[("p0", 0, 4), ("p0", 5, 5)]).contains("elements 4..5 were not written"));
    assert!(try_pieces(&[("p0", 0, 6), ("p0", 5, 5)]).contains("written twice"));
    assert!(try_pieces(&[("p0", 0, 9)]).contains("0..9 were written"));
    assert!(try_pieces(&[("p0", 0, 10), ("p1", 0, 1)]).contains("no such parameter"));
    let tmp = checkpoint::tmp_dir(run.path(), 5, "y");
    ShardWriter::create(&tmp, 0).unwrap().finish().unwrap();
    let e = checkpoint::commit(&tmp, manifest(5, 2, params(&[10])), &checkpoint::step_dir(run.path(), 5)).unwrap_err().to_string();
    assert!(e.contains("rank-00001.json"), "{e}");
}

#[test]
fn only_good_checkpoints_count_as_kept() {
    let run = tempfile::tempdir().unwrap();
    for step in [1, 2, 3, 10] {
        write(run.path(), step, 1, &[20], &[]);
    }
    fs::remove_file(run.path().join("step-00000010/rank-00000.bin")).unwrap();
    fs::create_dir(run.path().join("step-x")).unwrap();
    let removed = checkpoint::keep_latest(run.path(), 2).unwrap();
    assert_eq!(removed, [run.path().join("step-00000001")]);
    assert!(run.path().join("step-00000002").is_dir() && run.path().join("step-00000010").is_dir());
    let found = checkpoint::latest(run.path(), Check::Sizes).unwrap();
    assert_eq!(found.found.unwrap().manifest().step, 3);
    assert!(found.skipped[0].1.to_string().contains("rank-00000.bin"));
    // A resumed run reaches the step of a damaged checkpoint again and replaces it.
    write(run.path(), 10, 2, &[20], &[]);
    assert_eq!(checkpoint::latest(run.path(), Check::Full).unwrap().found.unwrap().manifest().step, 10);
    assert!(checkpoint::latest(Path::new("/no/such/run"), Check::Full).unwrap().found.is_none());
    let manifest = run.path().join("step-00000010/manifest.json");
    let text = fs::read_to_string(&manifest).unwrap().replace("\"format\": 1", "\"format\": 9");
    fs::write(&manifest, text).unwrap();
    assert!(Reader::open(&run.path().join("step-00000010")).unwrap_err().to_string().contains("format 9"));
}

/// The disk ends in the middle of a save (a file size limit of the shell stands for it; the process is this test again).
#[test]
fn a_full_disk_is_an_error_that_leaves_the_previous_one() {
    const RUN: &str = "ZRT_TEST_FULL_DISK";
    let sizes = [600_000];
    if let Some(run) = std::env::var_os(RUN) {
        let tmp = checkpoint::tmp_dir(Path::new(&run), 2, "full");
        let mut w = ShardWriter::create(&tmp, 0).unwrap();
        let e = KINDS.iter().find_map(|k| w.write(*k, "p0", 0, &values(*k, 0, 0, sizes[0])).err()).expect("the limit is below the data");
        drop(w);
        assert!(e.to_string().contains("cannot write") && e.to_string().contains("rank-00000.bin"), "{e}");
        checkpoint::abandon(&tmp);
        return;
    }
    let run = tempfile::tempdir().unwrap();
    write(run.path(), 1, 1, &sizes, &[]);
    let status = std::process::Command::new("bash")
        .args(["-c", "trap '' XFSZ; ulimit -f 2048; exec \"$0\" --exact a_full_disk_is_an_error_that_leaves_the_previous_one"])
        .arg(std::env::current_exe().unwrap())
        .env(RUN, run.path())
        .status()
        .unwrap();
    assert!(status.success());
    assert_eq!(fs::read_dir(run.path()).unwrap().count(), 1);
    assert_eq!(checkpoint::latest(run.path(), Check::Full).unwrap().found.unwrap().manifest().step, 1);
    // A folder that cannot be written says which and why.
    let file = run.path().join("step-00000001/manifest.json");
    let e = ShardWriter::create(&checkpoint::tmp_dir(&file, 2, "n"), 0).unwrap_err().to_string();
    assert!(e.contains("cannot create") && e.contains("manifest.json"), "{e}");
}
