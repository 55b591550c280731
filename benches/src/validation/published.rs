//! Published rows: each becomes a configuration of ours and a machine of the catalogue.

use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;
use zrt::config::Config;
use zrt::cost::{Catalogue, Cluster, Predictor};
use zrt::error::{Error, Result};

/// `published.toml`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Corpus {
    /// Geometries by name.
    pub models: BTreeMap<String, Geometry>,
    /// Rows within scope.
    pub run: Vec<Run>,
    /// Claims that cannot be.
    pub claim: Vec<Claim>,
    /// Rows outside it, and why.
    pub outside: Vec<Outside>,
}

/// What config.json must say.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Geometry {
    hidden: usize,
    mlp: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    vocab: usize,
}

/// What a row is for.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Fixes the efficiency of its part.
    Calibration,
    /// Never used for that.
    HeldOut,
    /// Shown, not counted.
    Other,
}

/// One published run.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Run {
    /// Number in the collection.
    pub row: u32,
    /// Who ran what.
    pub family: String,
    /// See [`Role`].
    pub role: Role,
    /// Machine spec.
    pub machine: String,
    /// Key of [`Corpus::models`].
    pub model: String,
    /// Tokens of a sequence.
    pub seq: usize,
    micro_batch: usize,
    accumulation: usize,
    #[serde(default = "three")]
    stage: u8,
    #[serde(default)]
    recompute: bool,
    #[serde(default)]
    offload: Option<String>,
    #[serde(default)]
    lora_rank: Option<usize>,
    #[serde(default)]
    lora_attention_rank: Option<usize>,
    /// In `unit`.
    pub measured: f64,
    /// `tokens/s/device`, `samples/s`, `s/step` or `TFLOPS/device, recomputation counted`.
    pub unit: String,
    /// Peak of a device.
    #[serde(default)]
    pub memory_gib: Option<f64>,
    /// Where it was published.
    pub source: String,
    /// What is not said there.
    #[serde(default)]
    pub assumed: String,
}

fn three() -> u8 {
    3
}

/// A speed that someone claims.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Claim {
    /// What.
    pub name: String,
    tokens_per_s: f64,
    parameters: f64,
    flops_per_token_and_parameter: f64,
    peak_flops: f64,
    /// Who says so.
    pub source: String,
}

impl Claim {
    /// FLOP/s that the claim needs, over the highest that the part can do.
    pub fn excess(&self) -> f64 {
        self.tokens_per_s * self.parameters * self.flops_per_token_and_parameter / self.peak_flops
    }
}

/// Rows that no configuration describes.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Outside {
    /// Numbers.
    pub rows: Vec<u32>,
    /// Why.
    pub why: String,
}

/// A row and what is predicted of it.
pub struct Outcome<'a> {
    /// The row.
    pub run: &'a Run,
    /// In the row's unit, with the bytes of a device; or why it cannot run.
    pub predicted: std::result::Result<(f64, f64), String>,
    /// Percent of the measured rate by which the predicted rate is off: positive is too fast.
    pub error: Option<f64>,
    /// What was measured needs more than the part's ceiling: not believed, not counted.
    pub refused: bool,
}

/// Reads `published.toml`.
pub fn corpus(path: &Path) -> Result<Corpus> {
    let text = std::fs::read_to_string(path).map_err(|source| Error::Io { path: path.display().to_string(), source })?;
    toml::from_str(&text).map_err(|e| Error::Input(format!("{}: {e}", path.display())))
}

/// What training reaches of a part's highest rates: fitted to calibration rows, then frozen.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Shares {
    /// Share of the highest product rate.
    pub matmul: f64,
    /// Factor on the catalogue's rates of attention; 1 where no calibration row has long sequences.
    pub attention: f64,
}

/// By part: `efficiency.toml`.
pub type Efficiency = BTreeMap<String, Shares>;

/// Sequences from which on attention is a large part of a step.
const LONG: usize = 16_384;

/// One predictor for all rows, and the folders of their models.
pub struct Predictions<'a> {
    corpus: &'a Corpus,
    catalogue: Catalogue,
    predictor: Predictor,
    folder: tempfile::TempDir,
}

impl<'a> Predictions<'a> {
    /// With the built-in catalogue.
    pub fn new(corpus: &'a Corpus) -> Result<Predictions<'a>> {
        let folder = tempfile::tempdir().map_err(|source| Error::Io { path: "a temporary folder".into(), source })?;
        for (name, g) in &corpus.models {
            let json = serde_json::json!({
                "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": g.hidden, "intermediate_size": g.mlp,
                "num_hidden_layers": g.layers, "num_attention_heads": g.heads, "num_key_value_heads": g.kv_heads,
                "vocab_size": g.vocab, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 131072,
                "tie_word_embeddings": false, "torch_dtype": "bfloat16"
            });
            let path = folder.path().join(name);
            std::fs::create_dir_all(&path)
                .and_then(|()| std::fs::write(path.join("config.json"), json.to_string()))
                .map_err(|source| Error::Io { path: path.display().to_string(), source })?;
        }
        Ok(Predictions { corpus, catalogue: Catalogue::builtin()?, predictor: Predictor::default(), folder })
    }

    fn config(&self, run: &Run) -> Result<Config> {
        let offload = |what: &str| if matches!(run.offload.as_deref(), Some(o) if o == what || o == "all") { "cpu" } else { "none" };
        let mut text = format!(
            "[model]\npath = \"{}\"\ninit = \"random\"\n[[dataset]]\npath = \"none.jsonl\"\n[training]\nseq_len = {}\nmicro_batch_size = {}\n\
             gradient_accumulation_steps = {}\nsteps = 100\n[zero]\nstage = {}\noffload_param = \"{}\"\noffload_optimizer = \"{}\"\n\
             [activation_checkpoint]\nmode = \"{}\"\n",
            self.folder.path().join(&run.model).display(),
            run.seq,
            run.micro_batch,
            run.accumulation,
            run.stage,
            offload("param"),
            offload("optimizer"),
            if run.recompute { "full" } else { "none" },
        );
        if let Some(r) = run.lora_rank {
            text += &format!("[lora]\nr = {r}\n");
        }
        if let Some(r) = run.lora_attention_rank {
            text += &format!("[lora]\nr = {r}\ntarget_modules = [\"q_proj\", \"k_proj\", \"v_proj\", \"o_proj\"]\n");
        }
        let file = self.folder.path().join("train.toml");
        std::fs::write(&file, text).map_err(|source| Error::Io { path: file.display().to_string(), source })?;
        Config::load(&file, &[]).map_err(|e| Error::Input(format!("row {}: {e}", run.row)))
    }

    fn cluster(&self, run: &Run, efficiency: &Efficiency) -> Result<Cluster> {
        let mut cluster = self.catalogue.cluster(&run.machine)?;
        if let Some(shares) = efficiency.get(&cluster.part.name) {
            cluster.part.matmul.values_mut().for_each(|m| m.share.value = shares.matmul);
            cluster.part.attention.forward.value *= shares.attention;
            cluster.part.attention.backward.value *= shares.attention;
        }
        Ok(cluster)
    }

    /// What is predicted of one row. A plan that would not fit is timed all the same: others' programs keep other bytes.
    pub fn outcome(&self, run: &'a Run, efficiency: &Efficiency) -> Result<Outcome<'a>> {
        let (config, cluster) = (self.config(run)?, self.cluster(run, efficiency)?);
        let p = match self.predictor.predict(&config, &cluster) {
            Ok(p) => p,
            Err(e) => return Ok(Outcome { run, predicted: Err(e.to_string()), error: None, refused: false }),
        };
        let (secs, devices) = (p.secs.expected, cluster.ranks() as f64);
        let sequences = p.tokens as f64 / run.seq as f64;
        // Useful FLOPs, and the forward pass once more where it is recomputed.
        let passes = if p.parameters.0 == p.parameters.1 { 3.0 } else { 2.0 };
        let counted = p.useful_flops * if run.recompute { (passes + 1.0) / passes } else { 1.0 };
        let (value, faster) = match run.unit.as_str() {
            "tokens/s/device" => (p.tokens as f64 / secs / devices, 1.0),
            "samples/s" => (sequences / secs, 1.0),
            "s/step" => (secs, -1.0),
            "TFLOPS/device, recomputation counted" => (counted / 1e12, 1.0),
            unit => return Err(Error::Input(format!("row {}: unit {unit} is not known", run.row))),
        };
        let rate_ratio: f64 = if faster > 0.0 { value / run.measured } else { run.measured / value };
        let ceiling = cluster.part.matmul.get("bf16").map_or(f64::INFINITY, |m| m.ceiling.value);
        let refused = counted / rate_ratio > ceiling;
        Ok(Outcome {
            run,
            predicted: Ok((value, p.memory.device_bytes as f64)),
            error: (!refused).then_some(100.0 * (rate_ratio - 1.0)),
            refused,
        })
    }

    /// All rows.
    pub fn outcomes(&self, efficiency: &Efficiency) -> Result<Vec<Outcome<'a>>> {
        self.corpus.run.iter().map(|run| self.outcome(run, efficiency)).collect()
    }

    /// Logarithms of predicted over measured rates.
    fn biases(&self, runs: &[&'a Run], part: &str, shares: Shares) -> Result<Vec<f64>> {
        let efficiency = Efficiency::from([(part.to_string(), shares)]);
        runs.iter().map(|r| Ok(self.outcome(r, &efficiency)?.error.map_or(0.0, |e| (1.0 + e / 100.0).ln()))).collect()
    }

    /// A part's numbers, such that its calibration rows are right in the mean (of logarithms), and where some have long sequences with
    /// the attention that leaves the least squares. Nothing else is fitted.
    pub fn fit(&self) -> Result<Efficiency> {
        let mut rows: BTreeMap<String, Vec<&Run>> = BTreeMap::new();
        for run in self.corpus.run.iter().filter(|r| r.role == Role::Calibration) {
            rows.entry(self.catalogue.cluster(&run.machine)?.part.name).or_default().push(run);
        }
        let mut out = Efficiency::new();
        for (part, runs) in rows {
            let matmul_for = |attention: f64| -> Result<Shares> {
                // Faster products, faster steps: halving finds the zero.
                let (mut low, mut high) = (0.2, 1.0);
                for _ in 0..12 {
                    let matmul = (low + high) / 2.0;
                    let bias: f64 = self.biases(&runs, &part, Shares { matmul, attention })?.iter().sum();
                    if bias > 0.0 { high = matmul } else { low = matmul }
                }
                Ok(Shares { matmul: (low + high) / 2.0, attention })
            };
            let long = runs.iter().any(|r| r.seq >= LONG);
            let factors: Vec<f64> = if long { (4..=24).map(|i| f64::from(i) / 20.0).collect() } else { vec![1.0] };
            let mut best: Option<(f64, Shares)> = None;
            for attention in factors {
                let shares = matmul_for(attention)?;
                let squares: f64 = self.biases(&runs, &part, shares)?.iter().map(|b| b * b).sum();
                if best.is_none_or(|(least, _)| squares < least) {
                    best = Some((squares, shares));
                }
            }
            out.extend(best.map(|(_, shares)| (part, shares)));
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::validation::data;

    #[test]
    fn every_row_of_the_collection_is_accounted_for_once_or_more() {
        let corpus = corpus(&data("published.toml")).unwrap();
        let mut seen: Vec<u32> = corpus.run.iter().map(|r| r.row).chain(corpus.outside.iter().flat_map(|o| o.rows.clone())).collect();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen, (1..=87).collect::<Vec<u32>>());
        assert!(corpus.run.iter().all(|r| corpus.models.contains_key(&r.model) && r.measured > 0.0));
        // A family has one role: what is held out is held out whole.
        for a in &corpus.run {
            assert!(corpus.run.iter().all(|b| a.family != b.family || a.role == b.role), "{}", a.family);
        }
    }

    #[test]
    fn impossible_claims_are_refused() {
        let corpus = corpus(&data("published.toml")).unwrap();
        assert!(corpus.claim.iter().all(|c| c.excess() > 1.0));
        // The page's own figures: more than ten times a dense bf16 peak.
        assert!(corpus.claim.iter().filter(|c| c.name.starts_with("DGX")).all(|c| c.excess() > 10.0));
    }

    #[test]
    fn a_row_that_needs_more_than_the_ceiling_is_refused_and_not_counted() {
        let mut corpus = corpus(&data("published.toml")).unwrap();
        corpus.run.truncate(1);
        corpus.run[0].measured *= 10.0;
        let predictions = Predictions::new(&corpus).unwrap();
        let outcome = predictions.outcome(&corpus.run[0], &Efficiency::new()).unwrap();
        assert!(outcome.refused && outcome.error.is_none());
    }
}
