//! Which plan is the fastest that fits? Every key that says `"auto"` (zero.stage, zero.offload_*, zero.resident_bytes,
//! training.micro_batch_size, training.micro_batch_group, activation_checkpoint.mode) is chosen by predicting the plans there are:
//! memory first, which is cheap, then the time of those that fit with a margin. What is written explicitly stays.

use crate::config::{Auto, CheckpointMode, Config, GroupSize, Offload, OffloadDevice, ResidentBytes};
use crate::cost::sheet::PartKind;
use crate::cost::{Ask, Catalogue, Cluster, Prediction, Predictor};
use crate::error::{Error, Result};

/// The plan chosen.
pub struct Choice {
    /// The configuration with nothing left to choose.
    pub config: Config,
    /// What it takes.
    pub best: Prediction,
    /// The fastest of each other kind (stage, homes), fastest first.
    pub runners_up: Vec<Prediction>,
    /// Plans whose time was predicted.
    pub timed: usize,
    /// Plans that did not fit.
    pub too_large: usize,
}

/// Keys that say `"auto"`.
pub fn open_keys(config: &Config) -> Vec<&'static str> {
    let (t, z) = (&config.training, &config.zero);
    [
        ("zero.stage", z.stage.is_auto()),
        ("zero.offload_param", z.offload_param.device == OffloadDevice::Auto),
        ("zero.offload_optimizer", z.offload_optimizer.device == OffloadDevice::Auto),
        ("zero.resident_bytes", z.resident_bytes.is_auto()),
        ("training.micro_batch_size", t.micro_batch_size.is_auto()),
        ("training.micro_batch_group", t.micro_batch_group.is_auto()),
        ("activation_checkpoint.mode", config.activation_checkpoint.mode == CheckpointMode::Auto),
    ]
    .into_iter()
    .filter_map(|(key, open)| open.then_some(key))
    .collect()
}

/// `config` with everything that can be chosen left to the planner: the step stays what it is.
pub fn all_open(config: &Config, ranks: usize) -> Config {
    let mut c = config.clone();
    if c.training.global_batch_size.is_none()
        && let Ok(batch) = config.resolve(ranks)
    {
        c.training.global_batch_size = Some(batch.global_batch_size);
        c.training.gradient_accumulation_steps = None;
    }
    if c.training.global_batch_size.is_some() {
        c.training.micro_batch_size = Auto::AUTO;
    }
    c.training.micro_batch_group = GroupSize::Named("auto".into());
    c.zero.stage = Auto::AUTO;
    c.zero.offload_param.device = OffloadDevice::Auto;
    c.zero.offload_optimizer.device = OffloadDevice::Auto;
    c.zero.resident_bytes = ResidentBytes::Named("auto".into());
    c.activation_checkpoint.mode = CheckpointMode::Auto;
    c.activation_checkpoint.layers = None;
    c
}

/// What a family of plans shares; recomputation and the resident set are fitted to memory within it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Family {
    stage: u8,
    offload_param: bool,
    offload_optimizer: bool,
    micro: usize,
    group: usize,
}

/// Most sequences of a micro-batch and most tokens of one that are tried.
const MOST_TOKENS: usize = 65536;
const MICRO: [usize; 6] = [1, 2, 4, 8, 16, 32];

fn device(offload: bool) -> Offload {
    Offload { device: if offload { OffloadDevice::Cpu } else { OffloadDevice::None }, pin_memory: true }
}

impl Family {
    /// All that `config` leaves open, in the order of preference: simple before complicated.
    fn all(config: &Config, cluster: &Cluster) -> Vec<Family> {
        let (t, z) = (&config.training, &config.zero);
        let ranks = cluster.ranks();
        let homes = |given: OffloadDevice| match given {
            OffloadDevice::None => vec![false],
            OffloadDevice::Cpu => vec![true],
            // A CPU's memory is the host's: there is nowhere else to put anything.
            OffloadDevice::Auto if cluster.part.kind == PartKind::Cpu => vec![false],
            OffloadDevice::Auto => vec![false, true],
        };
        let stages: Vec<u8> = match z.stage.set() {
            Some(stage) => vec![stage],
            None => vec![0, 1, 2, 3],
        };
        let per_rank = t.global_batch_size.map(|g| g / ranks);
        let micros: Vec<usize> = match t.micro_batch_size.set() {
            Some(micro) => vec![micro],
            None => MICRO
                .into_iter()
                .filter(|m| per_rank.is_some_and(|p| p.is_multiple_of(*m)) && (*m == 1 || m * t.seq_len <= MOST_TOKENS))
                .collect(),
        };
        let mut out = Vec::new();
        for &stage in &stages {
            for offload_param in homes(z.offload_param.device) {
                let chosen = z.stage.is_auto();
                // On one rank sharding changes nothing, and stage 3 is there to stream weights from the host.
                let pointless = ranks == 1 && stage > 0 && !offload_param;
                if offload_param && stage != 3 || chosen && pointless {
                    continue;
                }
                for offload_optimizer in homes(z.offload_optimizer.device) {
                    for &micro in &micros {
                        let accumulation = match (t.global_batch_size, t.gradient_accumulation_steps) {
                            (Some(global), _) => global / (micro * ranks).max(1),
                            (None, n) => n.unwrap_or(1),
                        };
                        let most = accumulation.max(1).next_power_of_two();
                        let groups = match &t.micro_batch_group {
                            // Without gathers there is nothing to share.
                            group if group.is_auto() && stage < 2 => vec![1],
                            group if group.is_auto() => (0..=most.ilog2()).map(|p| 1 << p).collect(),
                            GroupSize::Count(n) => vec![*n],
                            GroupSize::Named(_) => vec![most],
                        };
                        for group in groups {
                            out.push(Family { stage, offload_param, offload_optimizer, micro, group });
                        }
                    }
                }
            }
        }
        out
    }

    fn config(&self, base: &Config, recompute: Option<usize>, resident: Option<u64>) -> Config {
        let mut c = base.clone();
        c.zero.stage = Auto::Set(self.stage);
        c.zero.offload_param = device(self.offload_param);
        c.zero.offload_optimizer = device(self.offload_optimizer);
        c.training.micro_batch_size = Auto::Set(self.micro);
        c.training.micro_batch_group = GroupSize::Count(self.group);
        if let Some(layers) = recompute {
            let a = &mut c.activation_checkpoint;
            (a.mode, a.layers) = match layers {
                0 => (CheckpointMode::None, None),
                usize::MAX => (CheckpointMode::Full, None),
                layers => (CheckpointMode::Full, Some(layers)),
            };
        }
        if let Some(bytes) = resident {
            c.zero.resident_bytes = if bytes == u64::MAX { ResidentBytes::Named("all".into()) } else { ResidentBytes::Bytes(bytes) };
        }
        c
    }

    /// What distinguishes kinds of plans for the list of runners-up.
    fn kind(p: &Prediction) -> (u8, bool, bool) {
        (p.shape.stage, p.shape.offload_param, p.shape.offload_optimizer)
    }
}

/// Least bytes that a plan lacked.
struct Nearest {
    missing: (u64, u64),
    line: String,
}

/// One search.
struct Search<'a> {
    predictor: &'a Predictor,
    config: &'a Config,
    cluster: &'a Cluster,
    nearest: Option<Nearest>,
    too_large: usize,
}

impl Search<'_> {
    fn memory(&self, config: &Config) -> Result<Prediction> {
        self.predictor.ask(config, self.cluster, Ask::Memory)
    }

    /// Notes a plan that does not fit.
    fn refuse(&mut self, p: &Prediction) {
        self.too_large += 1;
        let missing = p.memory.missing();
        if self.nearest.as_ref().is_none_or(|n| missing.0 + missing.1 < n.missing.0 + n.missing.1) {
            self.nearest = Some(Nearest { missing, line: p.shape.line() });
        }
    }

    /// Plans of a family that fit: as little recomputation as memory allows, with and without what then remains for resident units.
    fn fitted(&mut self, family: Family) -> Result<Vec<Config>> {
        let free_recompute = self.config.activation_checkpoint.mode == CheckpointMode::Auto;
        let free_resident = self.config.zero.resident_bytes.is_auto();
        let least = free_resident.then_some(0);
        let make = |recompute: usize| family.config(self.config, free_recompute.then_some(recompute), least);
        let none = self.memory(&make(0))?;
        let recompute = if none.memory.fits() {
            0
        } else if !free_recompute {
            self.refuse(&none);
            return Ok(Vec::new());
        } else {
            let all = self.memory(&make(usize::MAX))?;
            if !all.memory.fits() {
                self.refuse(&all);
                return Ok(Vec::new());
            }
            self.least_recompute(&make, &none, &all)?
        };
        let mut out = vec![make(recompute)];
        let frozen = none.parameters.1 < none.parameters.0;
        if free_resident && family.stage == 3 && frozen && self.cluster.part.kind == PartKind::Gpu {
            for recompute in [recompute, usize::MAX] {
                if recompute == usize::MAX && !free_recompute {
                    continue;
                }
                if let Some(c) = self.fill(family, free_recompute.then_some(recompute))? {
                    out.push(c);
                }
            }
        }
        Ok(out)
    }

    /// The fewest recomputed blocks that fit: `none` does not, `all` does, and each block gives up about as much as another.
    fn least_recompute(&self, make: &dyn Fn(usize) -> Config, none: &Prediction, all: &Prediction) -> Result<usize> {
        let (mut low, mut high) = (0, all.shape.recomputable);
        let held = |p: &Prediction| p.memory.device_bytes + p.memory.host_bytes;
        let each = (held(none).saturating_sub(held(all)) / high.max(1) as u64).max(1);
        let missing = none.memory.missing();
        let mut next = (missing.0 + missing.1).div_ceil(each) as usize;
        let mut tries = 0;
        // `high` fits and `low` does not. The neighbours of the guess first, halves after.
        while high - low > 1 {
            let middle = if tries < 3 { next.clamp(low + 1, high - 1) } else { (low + high) / 2 };
            tries += 1;
            if self.memory(&make(middle))?.memory.fits() {
                (high, next) = (middle, middle - 1);
            } else {
                (low, next) = (middle, middle + 1);
            }
        }
        Ok(high)
    }

    /// The largest resident set that fits, in steps of what is found missing.
    fn fill(&self, family: Family, recompute: Option<usize>) -> Result<Option<Config>> {
        let at = |resident: u64| family.config(self.config, recompute, Some(resident));
        let base = self.memory(&at(0))?;
        let free = base.memory.device_capacity.saturating_sub(base.memory.device_bytes + base.memory.margin_bytes);
        let all = at(u64::MAX);
        if self.memory(&all)?.memory.fits() {
            return Ok(Some(all));
        }
        let mut resident = free;
        for _ in 0..4 {
            let config = at(resident);
            let missing = self.memory(&config)?.memory.missing().0;
            if missing == 0 {
                return Ok((resident > 1 << 30).then_some(config));
            }
            resident = resident.saturating_sub(missing);
        }
        Ok(None)
    }

    fn run(&mut self) -> Result<Vec<(Config, Prediction)>> {
        let mut timed = Vec::new();
        // Families that fit, and whether they do on the device and without recomputation: then moving state or weights to the host can
        // only cost.
        let mut found: Vec<(Family, bool)> = Vec::new();
        let lora = self.config.lora.is_some();
        for family in Family::all(self.config, self.cluster) {
            let dominated = found.iter().any(|(e, easy)| {
                let offloads = (family.offload_optimizer && !e.offload_optimizer || family.offload_param && !e.offload_param)
                    && e.stage <= family.stage;
                // Adapters are small: where they are trained, sharding their gradients or moving their state gains nothing.
                let for_adapters = match family.stage {
                    1 | 2 => e.stage == 0,
                    stage => {
                        e.stage == stage && e.offload_param == family.offload_param && family.offload_optimizer && !e.offload_optimizer
                    }
                };
                e.micro == family.micro && (*easy && offloads || lora && for_adapters)
            });
            if dominated {
                continue;
            }
            for config in self.fitted(family)? {
                let p = self.predictor.predict(&config, self.cluster)?;
                found.push((family, p.shape.recomputed == 0 && !family.offload_param && !family.offload_optimizer));
                timed.push((config, p));
            }
        }
        // Within a hundredth the first, simplest one stays first.
        timed.sort_by(|a, b| a.1.secs.expected.total_cmp(&b.1.secs.expected));
        if let Some(best) = timed.first().map(|t| t.1.secs.expected)
            && let Some(simple) = timed
                .iter()
                .enumerate()
                .filter(|(_, t)| t.1.secs.expected <= 1.01 * best)
                .min_by_key(|(_, (_, p))| {
                    (p.shape.offload_param, p.shape.offload_optimizer, p.shape.stage, p.shape.group, p.shape.micro_batch_size)
                })
                .map(|(i, _)| i)
        {
            let first = timed.remove(simple);
            timed.insert(0, first);
        }
        Ok(timed)
    }
}

/// Chooses what `config` leaves open for `cluster`.
///
/// # Errors
/// [`Error::Input`] when nothing fits: by how many bytes the nearest plan misses, and the cheapest change that fits.
pub fn choose(predictor: &Predictor, catalogue: &Catalogue, config: &Config, cluster: &Cluster) -> Result<Choice> {
    let mut search = Search { predictor, config, cluster, nearest: None, too_large: 0 };
    let timed = search.run()?;
    let count = timed.len();
    let mut timed = timed.into_iter();
    let Some((chosen, best)) = timed.next() else {
        return Err(nothing_fits(predictor, catalogue, config, cluster, search.nearest));
    };
    let mut runners_up: Vec<Prediction> = Vec::new();
    for (_, p) in timed {
        let kind = Family::kind(&p);
        if kind != Family::kind(&best) && runners_up.iter().all(|r| Family::kind(r) != kind) {
            runners_up.push(p);
        }
    }
    Ok(Choice { config: chosen, best, runners_up, timed: count, too_large: search.too_large })
}

/// Whether anything fits, asked as cheaply as can be: the smallest micro-batch, everything recomputed.
fn anything_fits(predictor: &Predictor, config: &Config, cluster: &Cluster) -> bool {
    let smallest = all_open(config, cluster.ranks());
    let families = Family::all(&smallest, cluster).into_iter().filter(|f| f.micro == 1 && f.group == 1);
    families.into_iter().any(|f| {
        let config = f.config(&smallest, Some(usize::MAX), Some(0));
        predictor.ask(&config, cluster, Ask::Memory).is_ok_and(|p| p.memory.fits())
    })
}

fn nothing_fits(predictor: &Predictor, catalogue: &Catalogue, config: &Config, cluster: &Cluster, nearest: Option<Nearest>) -> Error {
    let Some(nearest) = nearest else {
        return Error::Input(format!(
            "{}: no plan is possible: training.global_batch_size {} over {} ranks leaves no micro-batch",
            cluster.name(),
            config.training.global_batch_size.unwrap_or(0),
            cluster.ranks()
        ));
    };
    let (on_device, on_host) = nearest.missing;
    let mut lacks = Vec::new();
    if on_device > 0 {
        lacks.push(format!("{on_device} bytes ({:.1} GB) on each device", on_device as f64 / 1e9));
    }
    if on_host > 0 {
        lacks.push(format!("{on_host} bytes ({:.1} GB) on the host", on_host as f64 / 1e9));
    }
    Error::Input(format!(
        "nothing fits on {}: the plan that needs least ({}) lacks {}, margins included; {}",
        cluster.name(),
        nearest.line,
        lacks.join(" and "),
        cheapest_change(predictor, catalogue, config, cluster, (on_device, on_host))
    ))
}

/// The smallest change that makes something fit, in words: keys, then memory of the host, then devices, then another machine.
fn cheapest_change(predictor: &Predictor, catalogue: &Catalogue, config: &Config, cluster: &Cluster, missing: (u64, u64)) -> String {
    if anything_fits(predictor, config, cluster) {
        return "cheapest change that fits: leave zero.stage, zero.offload_param, zero.offload_optimizer, training.micro_batch_size and \
                activation_checkpoint.mode \"auto\""
            .into();
    }
    if missing.0 == 0 {
        return format!("cheapest change that fits: {:.1} GB more host memory", missing.1 as f64 / 1e9);
    }
    let divides = |ranks: usize| config.training.global_batch_size.is_none_or(|g| g.is_multiple_of(ranks));
    let price = |c: &Cluster| c.machine.price.as_ref().map(|p| p.per_device_hour.value * c.ranks() as f64);
    let smallest = |name: &str| {
        [1, 2, 4, 8, 16, 32].into_iter().filter(|n| divides(*n)).find_map(|n| {
            let larger = catalogue.cluster(&format!("{n}x{name}")).ok()?;
            anything_fits(predictor, config, &larger).then_some(larger)
        })
    };
    let priced = |c: &Cluster| price(c).map_or(String::new(), |p| format!(" (${p:.2} an hour)"));
    let own = smallest(&cluster.machine.name);
    let others =
        catalogue.machines().iter().filter(|m| m.price.is_some() && m.name != cluster.machine.name).filter_map(|m| smallest(&m.name));
    let best = own.into_iter().chain(others).filter(|c| price(c).is_some() || c.machine.name == cluster.machine.name).min_by(|a, b| {
        let of = |c: &Cluster| price(c).unwrap_or(f64::INFINITY);
        of(a).total_cmp(&of(b))
    });
    match best {
        Some(c) => format!("cheapest change that fits: {}{}", c.name(), priced(&c)),
        None => "no machine of the catalogue fits it with this batch: a shorter training.seq_len or a smaller model is needed".into(),
    }
}

/// How much faster the best plan is than `prediction`, if that is worth a line: at least a fifth.
pub fn much_faster(predictor: &Predictor, catalogue: &Catalogue, config: &Config, cluster: &Cluster, now: &Prediction) -> Option<Choice> {
    let open = all_open(config, cluster.ranks());
    let choice = choose(predictor, catalogue, &open, cluster).ok()?;
    (choice.best.secs.expected * 1.2 < now.secs.expected).then_some(choice)
}
