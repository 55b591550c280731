//! Logits of the runtime in f32, for `tests/tools/peft_check.py`:
//!
//! ```text
//! logits BASE ADAPTER|- OUT.safetensors
//! ```
//!
//! The file has `input_ids` `[2, 64]` and `logits` `[2, 64, V]`.

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use std::path::PathBuf;
use zrt_tests::Subject;
use zrt_tests::logits::logits_of;

const SEQ: usize = 64;
const ROWS: usize = 2;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [base, adapter, out] = &arguments[..] else { panic!("usage: logits BASE ADAPTER|- OUT.safetensors") };
    let subject = match adapter.as_str() {
        "-" => Subject::full(PathBuf::from(base)),
        dir => Subject::lora(PathBuf::from(base), PathBuf::from(dir)),
    };
    let vocab = zrt::hf::ArchConfig::load(&subject.folder).unwrap().vocab;
    let ids: Vec<i64> = (0..(ROWS * SEQ) as i64).map(|i| (i * i * 31 + i * 7 + 1) % vocab as i64).collect();
    let logits: Vec<f32> = ids.chunks(SEQ).flat_map(|row| logits_of(&subject, row)).collect();
    let tensors = [
        ("input_ids", TensorView::new(Dtype::I64, vec![ROWS, SEQ], bytemuck::cast_slice(&ids)).unwrap()),
        ("logits", TensorView::new(Dtype::F32, vec![ROWS, SEQ, vocab], bytemuck::cast_slice(&logits)).unwrap()),
    ];
    safetensors::serialize_to_file(tensors, None, std::path::Path::new(out)).unwrap();
}
