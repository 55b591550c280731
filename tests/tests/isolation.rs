//! Documents do not see each other: packed rows give each token the loss and the logits that its document has alone, and nothing
//! that happens to one document changes a bit of another. A pad token that is also the end-of-turn token is still learnt.

use std::sync::Arc;
use zrt::data::{HostBatch, Length, Schedule, ScheduleSpec, TokenSet};
use zrt::engine::EngineOptions;
use zrt_kernels::DType;
use zrt_tests::logits::{engine_with_logits, evaluate, max_diff};
use zrt_tests::*;

const SEQ: usize = 64;
/// Tokens of the documents: several to a row of 64.
const LENGTHS: [usize; 7] = [30, 17, 3, 16, 40, 24, 9];
const EOS: u32 = 2;

/// The text of document `d`, `flavour` changes every token of it but the last, which is EOS.
fn document(d: usize, flavour: u32) -> Vec<u32> {
    let text = |i: usize| 3 + ((d * 131 + i * 17 + i * i * 5) as u32 + flavour * 101) % 250;
    (0..LENGTHS[d]).map(|i| if i + 1 == LENGTHS[d] { EOS } else { text(i) }).collect()
}

/// `changed`: the document that is another one.
fn schedule(packing: bool, changed: Option<usize>) -> Schedule {
    let documents = (0..LENGTHS.len()).map(|d| {
        let ids = document(d, u32::from(changed == Some(d)));
        let trained = (0..ids.len()).map(|i| i >= ids.len() / 4).collect();
        (ids, trained)
    });
    // The pad token is the end-of-turn token, as in many tokenizers.
    let set = TokenSet::from_documents(documents, EOS).unwrap();
    let global = 8;
    let spec = ScheduleSpec {
        seq_len: SEQ,
        micro_batch_size: 1,
        global_batch_size: global,
        packing,
        shuffle: false,
        seed: 0,
        length: Length::Epochs(1.0),
    };
    Schedule::new(Arc::new(set), spec).unwrap()
}

/// Loss and logits of every token of each document: `[document]` -> (`[tokens]`, `[tokens, V]`).
type PerDocument = Vec<(Vec<f32>, Vec<f32>)>;

fn per_document(subject: &Subject, schedule: &Schedule, dtype: DType) -> PerDocument {
    let mut out = on_ranks(1, true, |comm| {
        let (mut engine, model) = engine_with_logits(subject, EngineOptions::new(shape(1, SEQ, dtype), 1), comm);
        let mut found = vec![(Vec::new(), Vec::new()); LENGTHS.len()];
        for index in 0..schedule.micro_batches() {
            let batch = schedule.batch(0, index);
            let (losses, logits) = evaluate(&mut engine, &model, &batch);
            for s in &batch.samples {
                let range = s.start..s.start + s.tokens;
                found[s.document] = (losses[range.clone()].to_vec(), logits[range.start * 256..range.end * 256].to_vec());
            }
        }
        found
    });
    out.pop().unwrap()
}

fn subjects() -> Vec<(&'static str, Subject)> {
    vec![
        ("llama, lora", Subject::lora(golden("tiny_model"), golden("tiny_lora/adapter_random"))),
        ("llama3 rope", Subject::full(golden("tiny_arch/llama3_rope"))),
        ("mistral", Subject::full(golden("tiny_arch/mistral"))),
        ("qwen2", Subject::full(golden("tiny_arch/qwen2"))),
        ("qwen3", Subject::full(golden("tiny_arch/qwen3"))),
    ]
}

/// Bit-equal: attention tiles begin where a document begins, and every other operation treats tokens one by one, so where a
/// document lies in its row leaves no trace.
#[test]
fn packed_equals_unpacked() {
    for (name, subject) in subjects() {
        for dtype in [DType::F32, DType::BF16] {
            let packed = schedule(true, None);
            assert!(packed.rows() < LENGTHS.len(), "the test packs several documents into a row");
            let (a, b) = (per_document(&subject, &packed, dtype), per_document(&subject, &schedule(false, None), dtype));
            for (d, (a, b)) in a.iter().zip(&b).enumerate() {
                assert_eq!(a.0.len(), LENGTHS[d]);
                assert_eq!(bits(&a.0), bits(&b.0), "{name} {dtype}: losses of document {d}, up to {:.1e} apart", max_diff(&a.0, &b.0));
                assert_eq!(bits(&a.1), bits(&b.1), "{name} {dtype}: logits of document {d}, up to {:.1e} apart", max_diff(&a.1, &b.1));
            }
            assert!(a.iter().map(|d| d.0.iter().sum::<f32>()).sum::<f32>() > 10.0, "something is trained");
            println!("{name} {dtype}: packed and unpacked documents have the same losses and logits, bit by bit");
        }
    }
}

/// Whatever stands in one document of a row, no bit of another's losses and logits depends on it.
#[test]
fn a_document_never_sees_another() {
    for (name, subject) in subjects() {
        for dtype in [DType::F32, DType::BF16] {
            let original = per_document(&subject, &schedule(true, None), dtype);
            for changed in [0, 1, 4] {
                let other = per_document(&subject, &schedule(true, Some(changed)), dtype);
                for d in 0..LENGTHS.len() {
                    let same = bits(&original[d].0) == bits(&other[d].0) && bits(&original[d].1) == bits(&other[d].1);
                    assert_eq!(same, d != changed, "{name} {dtype}: document {d} after document {changed} was changed");
                }
            }
            println!("{name} {dtype}: changing one document changes no bit of the others");
        }
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// The pad token is the end-of-turn token: the real one at a document's end is trained, padding is not.
#[test]
fn padding_is_not_trained_and_the_end_of_turn_is() {
    let schedule = schedule(false, None);
    let subject = &subjects()[0].1;
    let losses = per_document(subject, &schedule, DType::F32);
    for index in 0..LENGTHS.len() {
        let batch: HostBatch = schedule.batch(0, index);
        let sample = batch.samples[0];
        let end = sample.tokens;
        assert!(batch.ids[end - 1..].iter().all(|&id| id == EOS as i32), "the document ends with EOS, padding follows");
        assert!(batch.labels[end - 1..].iter().all(|&l| l < 0), "nothing is predicted from EOS or padding");
        if end > 1 {
            assert_eq!(batch.labels[end - 2], EOS as i32, "EOS is predicted");
            assert!(losses[sample.document].0[end - 2] > 0.0, "and counts");
        }
        assert_eq!(batch.labels.iter().filter(|&&l| l >= 0).count() as u64, batch.trained);
    }
}
