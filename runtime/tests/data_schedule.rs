//! Properties of the schedule: every document once an epoch, batches consistent with documents, counts that add up, and any step
//! found without the ones before it. All exact.

use proptest::prelude::*;
use std::sync::Arc;
use zrt::data::{HostBatch, IGNORE, Length, Schedule, ScheduleSpec, TokenSet};

/// Documents of the given lengths; ids are unique, every third token is not trained.
fn set(lengths: &[usize]) -> Arc<TokenSet> {
    let mut next = 1u32;
    let documents = lengths.iter().map(|&n| {
        let ids: Vec<u32> = (next..next + n as u32).collect();
        next += n as u32;
        let trained = ids.iter().enumerate().map(|(i, id)| i == 1 || id % 3 != 0).collect();
        (ids, trained)
    });
    Arc::new(TokenSet::from_documents(documents, 0).unwrap())
}

fn spec() -> impl Strategy<Value = (Vec<usize>, ScheduleSpec)> {
    (prop::collection::vec(2usize..=32, 1..40), 1usize..4, 1usize..4, any::<bool>(), any::<bool>(), any::<u64>(), 1u32..4).prop_map(
        |(lengths, mbs, micro_batches, packing, shuffle, seed, epochs)| {
            let length = Length::Epochs(f64::from(epochs));
            (
                lengths,
                ScheduleSpec { seq_len: 32, micro_batch_size: mbs, global_batch_size: mbs * micro_batches, packing, shuffle, seed, length },
            )
        },
    )
}

fn check(set: &TokenSet, batch: &HostBatch, spec: &ScheduleSpec) {
    let n = spec.micro_batch_size * spec.seq_len;
    assert_eq!([batch.ids.len(), batch.labels.len(), batch.positions.len(), batch.cu_seqlens.len() - 1], [n; 4]);
    let bounds = &batch.cu_seqlens[..=batch.documents];
    assert_eq!((bounds[0], bounds[batch.documents]), (0, n as i32));
    assert!(bounds.windows(2).all(|w| w[0] < w[1]), "boundaries ascend");
    assert!(batch.cu_seqlens[batch.documents..].iter().all(|&b| b == n as i32));
    assert!((1..spec.micro_batch_size).all(|row| bounds.contains(&((row * spec.seq_len) as i32))), "no document crosses a row");
    for w in bounds.windows(2) {
        assert!((w[0]..w[1]).all(|i| batch.positions[i as usize] == i - w[0]), "positions restart");
        assert_eq!(batch.labels[w[1] as usize - 1], IGNORE, "nothing predicts the next document");
    }
    let mut real = vec![false; n];
    for s in &batch.samples {
        assert!(bounds.contains(&(s.start as i32)) && bounds.contains(&((s.start + s.tokens) as i32)));
        let doc = set.document(s.document);
        for i in 0..s.tokens {
            assert!(!std::mem::replace(&mut real[s.start + i], true), "no overlap");
            assert_eq!(batch.ids[s.start + i], doc.ids[i] as i32);
            if i + 1 < s.tokens {
                let expected = if doc.trained[i + 1] == 1 { doc.ids[i + 1] as i32 } else { IGNORE };
                assert_eq!(batch.labels[s.start + i], expected);
            }
        }
    }
    assert!((0..n).all(|i| real[i] || (batch.ids[i] == set.pad_id() as i32 && batch.labels[i] == IGNORE)));
    assert_eq!(batch.tokens, real.iter().filter(|&&r| r).count() as u64);
    assert_eq!(batch.trained, batch.labels.iter().filter(|&&l| l != IGNORE).count() as u64);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn epochs_cover_every_document_once_and_batches_are_consistent((lengths, spec) in spec()) {
        let set = set(&lengths);
        let schedule = Schedule::new(set.clone(), spec).unwrap();
        let epochs = match spec.length { Length::Epochs(e) => e as usize, Length::Steps(_) => unreachable!() };
        let mut seen = vec![0; lengths.len()];
        let mut rows = 0;
        for step in 0..schedule.total_steps() {
            let batches: Vec<HostBatch> = (0..schedule.micro_batches()).map(|m| schedule.batch(step, m)).collect();
            for batch in &batches {
                check(&set, batch, &spec);
                batch.samples.iter().for_each(|s| seen[s.document] += 1);
                let mut starts: Vec<usize> = batch.samples.iter().map(|s| s.start / spec.seq_len).collect();
                starts.dedup();
                rows += starts.len();
            }
            prop_assert_eq!(batches.iter().map(|b| b.trained).sum::<u64>(), schedule.trained_tokens(step));
        }
        prop_assert!(seen.iter().all(|&n| n == epochs));
        prop_assert_eq!(rows, epochs * schedule.rows());
        prop_assert_eq!(schedule.total_steps(), (rows as u64).div_ceil(spec.global_batch_size as u64));
        prop_assert_eq!(schedule.trained_tokens(schedule.total_steps()), 0);
        prop_assert!(schedule.batch(schedule.total_steps(), 0).samples.is_empty());
        prop_assert!(schedule.batch(0, schedule.micro_batches()).samples.is_empty());
    }

    #[test]
    fn a_step_does_not_depend_on_the_way_to_it((lengths, spec) in spec(), steps in prop::collection::vec((0u64..1000, 0usize..3), 1..10)) {
        // Another rank, or a run resumed at any step: a schedule made anew, asked in any order.
        let spec = ScheduleSpec { length: Length::Steps(1000), ..spec };
        let (walked, sought) = (Schedule::new(set(&lengths), spec).unwrap(), Schedule::new(set(&lengths), spec).unwrap());
        for (step, m) in steps {
            let m = m % walked.micro_batches();
            for before in step.saturating_sub(3)..step {
                walked.batch(before, m);
            }
            prop_assert_eq!(walked.batch(step, m), sought.batch(step, m));
        }
    }

    #[test]
    fn micro_batch_size_does_not_change_the_rows_of_a_step((lengths, spec) in spec()) {
        let documents = |mbs: usize| -> Vec<Vec<usize>> {
            let spec = ScheduleSpec { micro_batch_size: mbs, ..spec };
            let schedule = Schedule::new(set(&lengths), spec).unwrap();
            let of = |s| (0..schedule.micro_batches()).flat_map(|m| schedule.batch(s, m).samples).map(|s| s.document).collect();
            (0..schedule.total_steps()).map(of).collect()
        };
        prop_assert_eq!(documents(1), documents(spec.global_batch_size));
    }
}

#[test]
fn each_epoch_has_its_own_order_and_the_seed_decides() {
    let lengths = vec![4; 100];
    let spec = ScheduleSpec {
        seq_len: 4,
        micro_batch_size: 1,
        global_batch_size: 100,
        packing: false,
        shuffle: true,
        seed: 1,
        length: Length::Epochs(2.0),
    };
    let order = |spec: ScheduleSpec, step| -> Vec<usize> {
        let schedule = Schedule::new(set(&lengths), spec).unwrap();
        (0..100).map(|m| schedule.batch(step, m).samples[0].document).collect()
    };
    assert_ne!(order(spec, 0), order(spec, 1));
    assert_ne!(order(spec, 0), order(ScheduleSpec { seed: 2, ..spec }, 0));
    assert_eq!(order(spec, 1), order(spec, 1));
    assert_eq!(order(ScheduleSpec { shuffle: false, ..spec }, 1), (0..100).collect::<Vec<_>>());
}

#[test]
fn a_fraction_of_an_epoch_and_a_ragged_tail() {
    let spec = ScheduleSpec {
        seq_len: 4,
        micro_batch_size: 2,
        global_batch_size: 4,
        packing: false,
        shuffle: false,
        seed: 1,
        length: Length::Epochs(1.5),
    };
    let schedule = Schedule::new(set(&[4; 6]), spec).unwrap();
    assert_eq!(schedule.total_steps(), 3);
    assert_eq!(schedule.batch(2, 0).samples.len(), 1);
    let missing = schedule.batch(2, 1);
    assert_eq!((missing.samples.len(), missing.trained, missing.tokens, missing.documents), (0, 0, 0, 2));
    let evaluation = Schedule::evaluation(set(&[4; 6]), 4, 4, false).unwrap();
    assert_eq!((evaluation.total_steps(), evaluation.micro_batches()), (2, 1));
    let all: Vec<usize> = (0..2).flat_map(|s| evaluation.batch(s, 0).samples).map(|s| s.document).collect();
    assert_eq!(all, [0, 1, 2, 3, 4, 5]);
}

#[test]
fn contradictions_are_errors() {
    let good = ScheduleSpec {
        seq_len: 8,
        micro_batch_size: 2,
        global_batch_size: 4,
        packing: true,
        shuffle: true,
        seed: 1,
        length: Length::Epochs(1.0),
    };
    for (bad, expected) in [
        (ScheduleSpec { global_batch_size: 5, ..good }, "5 = 2 x 2 + 1"),
        (ScheduleSpec { micro_batch_size: 0, ..good }, "at least 1"),
        (ScheduleSpec { seq_len: 4, ..good }, "longer than seq_len 4"),
        (ScheduleSpec { length: Length::Steps(0), ..good }, "training.steps"),
        (ScheduleSpec { length: Length::Epochs(f64::NAN), ..good }, "training.epochs"),
        (ScheduleSpec { length: Length::Epochs(-1.0), ..good }, "training.epochs"),
        (ScheduleSpec { seq_len: usize::MAX / 2, ..good }, "31 bits"),
    ] {
        let error = Schedule::new(set(&[8, 3]), bad).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    assert!(TokenSet::from_documents([(vec![1, 2], vec![true])], 0).is_err());
    assert!(TokenSet::from_documents([(vec![1, 2], vec![true, false])], 0).is_err());
}
