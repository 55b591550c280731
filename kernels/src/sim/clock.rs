//! When would each item of a tape run? Streams are queues of works; an event queue advances all of them together, since what runs at
//! the same time slows the others. The step is played twice, the second time after the first, and the second is what counts:
//! what a step leaves behind for the next one (an update that runs under the next forward) is there as in the middle of a run.

use super::tape::{NEVER, Tape, What};

/// What a stream does, as far as streams slow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Class {
    /// Kernels of the device.
    Compute,
    /// Collectives.
    Collective,
    /// Copies between host and device.
    Link,
    /// Work of the host's processor.
    Host,
}

/// How running streams slow each other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Sharing {
    /// Device kernels and collectives, while both run, take so much longer.
    Factors {
        /// Kernels.
        compute: f64,
        /// Collectives.
        collective: f64,
    },
    /// All streams are threads on so many cores: kernels want all of them, anything else one.
    Cores(f64),
}

/// What the clock must know of a machine.
pub struct Speeds<'a> {
    /// Seconds of each work of the tape, alone.
    pub secs: &'a [f64],
    /// Class of each work.
    pub class: &'a [Class],
    /// Slowdown.
    pub sharing: Sharing,
}

/// What the other streams did while the first one (compute) had nothing to run.
#[derive(Clone, Debug, PartialEq)]
pub struct Exposed {
    /// Index of the stream.
    pub lane: usize,
    /// Index of what it was about, in [`Tape::names`].
    pub tag: u32,
    /// Seconds of a step.
    pub secs: f64,
}

/// How a step runs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Played {
    /// Seconds of a step in the middle of a run.
    pub secs: f64,
    /// Per stream: seconds during which something runs.
    pub busy: Vec<f64>,
    /// Per work: seconds during which it runs, over all its calls.
    pub by_work: Vec<f64>,
    /// What was exposed, most first. What remains of the step, compute runs.
    pub exposed: Vec<Exposed>,
    /// Seconds in which nothing ran: the host was between calls.
    pub idle: f64,
}

/// A run of works on one stream between two meetings with others.
struct Node {
    lane: u8,
    class: Class,
    /// First work item and one past the last, for timelines.
    items: (u32, u32),
    secs: f64,
    tag: u32,
    /// Host waits that come before it.
    barrier: u32,
    /// Waits: range in `Graph::waits`.
    waits: (u32, u32),
    /// Counted so many times.
    weight: f64,
}

/// The tape as nodes and what each waits for.
struct Graph {
    nodes: Vec<Node>,
    /// Nodes waited for: index, or index + `nodes.len()` for one of the step before.
    waits: Vec<u32>,
    /// Per host wait: the node it waits for (or none).
    barriers: Vec<u32>,
    /// Per mark: the last node of the first stream before it.
    marks: [u32; 2],
    lanes: usize,
}

const NONE: u32 = u32::MAX;

/// What is pending on a stream while the tape is read.
#[derive(Clone, Default)]
struct Open {
    waits: Vec<(bool, u32)>,
    node: Option<usize>,
    last: Option<usize>,
}

impl Graph {
    fn new(tape: &Tape, speeds: &Speeds) -> Graph {
        let lanes = tape.lanes.len().max(1);
        let mut open = vec![Open::default(); lanes];
        let mut graph = Graph { nodes: Vec::with_capacity(1024), waits: Vec::new(), barriers: Vec::new(), marks: [NONE; 2], lanes };
        // Node after which each record has passed, by the record's item; waits of the step before look ahead.
        let mut passed = vec![NONE; tape.items.len()];
        let mut before: Vec<(usize, u32)> = Vec::new();
        let mut weight = 1.0;
        for (i, item) in tape.items.iter().enumerate() {
            let lane = usize::from(item.lane).min(lanes - 1);
            match item.what {
                What::Work { work, tag } => {
                    let (secs, class) = (speeds.secs[work as usize], speeds.class[work as usize]);
                    match open[lane].node {
                        Some(n) if open[lane].waits.is_empty() && graph.nodes[n].class == class && graph.nodes[n].tag == tag => {
                            graph.nodes[n].secs += secs;
                            graph.nodes[n].items.1 = i as u32 + 1;
                        }
                        _ => graph.start(&mut open[lane], lane, class, (i as u32, i as u32 + 1), secs, tag, weight, &mut before),
                    }
                }
                What::Record { .. } => {
                    if !open[lane].waits.is_empty() {
                        graph.start(&mut open[lane], lane, Class::Compute, (i as u32, i as u32), 0.0, 0, weight, &mut before);
                    }
                    open[lane].node = None;
                    passed[i] = open[lane].last.map_or(NONE, |n| n as u32);
                }
                What::Wait { record } => {
                    let node = passed[record as usize];
                    if node != NONE && graph.nodes[node as usize].lane as usize != lane {
                        open[lane].waits.push((false, node));
                    }
                }
                What::WaitBefore { record: NEVER } => {}
                What::WaitBefore { record } => open[lane].waits.push((true, record)),
                What::HostWait { record } => {
                    graph.barriers.push(passed[record as usize]);
                    open.iter_mut().for_each(|o| o.node = None);
                }
                What::Mark { mark } => {
                    graph.marks[(mark as usize).min(1)] = open[0].last.map_or(NONE, |n| n as u32);
                    open.iter_mut().for_each(|o| o.node = None);
                    weight = if mark == 0 { tape.repeats as f64 } else { 1.0 };
                }
            }
        }
        let count = graph.nodes.len() as u32;
        for (at, record) in before {
            // An event that was recorded before anything ran says nothing.
            let node = passed[record as usize];
            graph.waits[at] = if node == NONE { NONE } else { node + count };
        }
        graph
    }

    #[allow(clippy::too_many_arguments)]
    fn start(
        &mut self,
        open: &mut Open,
        lane: usize,
        class: Class,
        items: (u32, u32),
        secs: f64,
        tag: u32,
        weight: f64,
        before: &mut Vec<(usize, u32)>,
    ) {
        let first = self.waits.len() as u32;
        for (earlier, of) in open.waits.drain(..) {
            if earlier {
                before.push((self.waits.len(), of));
            }
            self.waits.push(of);
        }
        let barrier = self.barriers.len() as u32;
        self.nodes.push(Node { lane: lane as u8, class, items, secs, tag, barrier, waits: (first, self.waits.len() as u32), weight });
        open.node = Some(self.nodes.len() - 1);
        open.last = open.node;
    }
}

/// A node as it ran, for timelines.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// Index of the stream.
    pub lane: usize,
    /// Items of the tape from here ...
    pub first: usize,
    /// ... to before here.
    pub end: usize,
    /// Seconds from the beginning of the step.
    pub start_secs: f64,
    /// Its end.
    pub end_secs: f64,
}

struct Lane {
    queue: Vec<u32>,
    at: usize,
    running: Option<(u32, f64)>,
    rate: f64,
    started: f64,
}

/// Plays the tape. `spans` receives what ran in the counted step.
///
/// # Errors
/// The stream and item at which the program would wait for ever.
pub fn play(tape: &Tape, speeds: &Speeds, mut spans: Option<&mut Vec<Span>>) -> Result<Played, String> {
    let graph = Graph::new(tape, speeds);
    let count = graph.nodes.len();
    let steps = 2;
    let mut done = vec![f64::NAN; steps * count];
    let mut lanes: Vec<Lane> =
        (0..graph.lanes).map(|_| Lane { queue: Vec::new(), at: 0, running: None, rate: 1.0, started: 0.0 }).collect();
    for step in 0..steps {
        for (n, node) in graph.nodes.iter().enumerate() {
            lanes[node.lane as usize].queue.push((step * count + n) as u32);
        }
    }
    let per_step = graph.barriers.len();
    // Host waits passed so far, over both steps, and when.
    let mut barriers = 0;
    let mut step_ends = [0.0; 2];
    let mut exposed: std::collections::HashMap<(u8, u32), f64> = Default::default();
    let (mut now, mut idle) = (0.0, 0.0);
    let mut busy = vec![0.0; graph.lanes];
    loop {
        // The host passes what it can, streams start what they can, until nothing moves.
        loop {
            let mut moved = false;
            while barriers < steps * per_step {
                let step = barriers / per_step;
                let node = graph.barriers[barriers % per_step];
                if node != NONE && done[step * count + node as usize].is_nan() {
                    break;
                }
                barriers += 1;
                if barriers % per_step == 0 {
                    step_ends[step] = now;
                }
                moved = true;
            }
            for lane in &mut lanes {
                while lane.running.is_none() && lane.at < lane.queue.len() {
                    let id = lane.queue[lane.at] as usize;
                    let (step, n) = (id / count, id % count);
                    let node = &graph.nodes[n];
                    if barriers < step * per_step + node.barrier as usize {
                        break;
                    }
                    let waits = &graph.waits[node.waits.0 as usize..node.waits.1 as usize];
                    let ready = waits.iter().all(|&w| match w {
                        NONE => true,
                        w if (w as usize) < count => !done[step * count + w as usize].is_nan(),
                        _ if step == 0 => true,
                        w => !done[(step - 1) * count + w as usize - count].is_nan(),
                    });
                    if !ready {
                        break;
                    }
                    lane.at += 1;
                    moved = true;
                    if node.secs > 0.0 {
                        lane.running = Some((id as u32, node.secs));
                        lane.started = now;
                    } else {
                        done[id] = now;
                    }
                }
            }
            if !moved {
                break;
            }
        }
        if barriers == steps * per_step && per_step > 0 || lanes.iter().all(|l| l.running.is_none() && l.at == l.queue.len()) {
            break;
        }
        set_rates(&mut lanes, &graph, count, speeds.sharing);
        let next = lanes.iter().filter_map(|l| l.running.map(|(_, left)| left / l.rate)).fold(f64::INFINITY, f64::min);
        if !next.is_finite() {
            let stuck = lanes.iter().enumerate().find(|(_, l)| l.at < l.queue.len());
            let where_ = stuck.map_or(String::new(), |(i, l)| {
                let node = &graph.nodes[l.queue[l.at] as usize % count];
                format!("stream {} at item {}", tape.lanes.get(i).map_or("?", |n| n), node.items.0)
            });
            return Err(format!("the program waits for ever: {where_}"));
        }
        let counted = barriers >= per_step;
        if counted {
            account(&lanes, &graph, count, next, &mut busy, &mut exposed, &mut idle);
        }
        now += next;
        for (i, lane) in lanes.iter_mut().enumerate() {
            if let Some((id, left)) = &mut lane.running {
                *left -= next * lane.rate;
                // Rounding: what is left of a finished node is noise.
                if *left <= 1e-12 {
                    let id = *id as usize;
                    done[id] = now;
                    lane.running = None;
                    if let Some(spans) = &mut spans
                        && id >= count
                    {
                        let node = &graph.nodes[id - count];
                        let (first, end) = (node.items.0 as usize, node.items.1 as usize);
                        spans.push(Span { lane: i, first, end, start_secs: lane.started, end_secs: now });
                    }
                }
            }
        }
    }
    if per_step == 0 {
        step_ends = [now / 2.0, now];
    }
    if let Some(spans) = spans {
        spans.iter_mut().for_each(|s| (s.start_secs, s.end_secs) = (s.start_secs - step_ends[0], s.end_secs - step_ends[0]));
    }
    let mark = |m: u32| if m == NONE { step_ends[0] } else { done.get(count + m as usize).copied().unwrap_or(f64::NAN) };
    let repeated = if tape.repeats > 1 && graph.marks[1] != NONE { mark(graph.marks[1]) - mark(graph.marks[0]) } else { 0.0 };
    let mut exposed: Vec<Exposed> = exposed.into_iter().map(|((lane, tag), secs)| Exposed { lane: usize::from(lane), tag, secs }).collect();
    exposed.sort_by(|a, b| b.secs.total_cmp(&a.secs).then((a.lane, a.tag).cmp(&(b.lane, b.tag))));
    Ok(Played {
        secs: step_ends[1] - step_ends[0] + (tape.repeats.max(1) - 1) as f64 * repeated.max(0.0),
        busy,
        by_work: by_work(tape, speeds),
        exposed,
        idle,
    })
}

/// Seconds of each work over its calls, alone on the machine.
fn by_work(tape: &Tape, speeds: &Speeds) -> Vec<f64> {
    let mut secs = vec![0.0; tape.works.len()];
    let mut weight = 1.0;
    for item in &tape.items {
        match item.what {
            What::Work { work, .. } => secs[work as usize] += weight * speeds.secs[work as usize],
            What::Mark { mark } => weight = if mark == 0 { tape.repeats as f64 } else { 1.0 },
            _ => {}
        }
    }
    secs
}

fn set_rates(lanes: &mut [Lane], graph: &Graph, count: usize, sharing: Sharing) {
    let class = |l: &Lane| l.running.map(|(id, _)| graph.nodes[id as usize % count].class);
    match sharing {
        Sharing::Factors { compute, collective } => {
            let both = lanes.iter().any(|l| class(l) == Some(Class::Compute)) && lanes.iter().any(|l| class(l) == Some(Class::Collective));
            for lane in lanes.iter_mut() {
                lane.rate = match class(lane) {
                    Some(Class::Compute) if both => 1.0 / compute,
                    Some(Class::Collective) if both => 1.0 / collective,
                    _ => 1.0,
                };
            }
        }
        Sharing::Cores(cores) => {
            let wants = |l: &Lane| match class(l) {
                Some(Class::Compute) => cores,
                Some(_) => 1.0,
                None => 0.0,
            };
            let rate = (cores / lanes.iter().map(wants).sum::<f64>()).min(1.0);
            lanes.iter_mut().for_each(|l| l.rate = rate);
        }
    }
}

/// Which lane was to blame for `secs` in which the first one ran nothing: one that runs, collectives first.
fn account(
    lanes: &[Lane],
    graph: &Graph,
    count: usize,
    secs: f64,
    busy: &mut [f64],
    exposed: &mut std::collections::HashMap<(u8, u32), f64>,
    idle: &mut f64,
) {
    let node = |l: &Lane| l.running.map(|(id, _)| &graph.nodes[id as usize % count]);
    for (lane, busy) in lanes.iter().zip(busy) {
        *busy += node(lane).map_or(0.0, |n| secs * n.weight);
    }
    if lanes[0].running.is_some() {
        return;
    }
    let rank = |n: &&Node| match n.class {
        Class::Collective => 0,
        Class::Link => 1,
        Class::Host => 2,
        Class::Compute => 3,
    };
    match lanes.iter().filter_map(node).min_by_key(rank) {
        Some(n) => *exposed.entry((n.lane, n.tag)).or_default() += secs * n.weight,
        None => *idle += secs,
    }
}

#[cfg(test)]
mod tests {
    use super::super::tape::Item;
    use super::super::work::{Kind, Work};
    use super::*;
    use crate::DType;

    const ALONE: Sharing = Sharing::Factors { compute: 1.0, collective: 1.0 };

    /// Works of given seconds on two streams.
    fn tape(secs: &[f64], items: &[(u8, What)]) -> (Tape, Vec<f64>, Vec<Class>) {
        let work =
            |i| Work { kind: Kind::Sum, dtype: DType::F32, forms: 0, crosses: false, dims: [i; 3], flops: 0, bytes: 0, host_bytes: 0 };
        let tape = Tape {
            lanes: vec!["compute".into(), "comm".into()],
            works: (0..secs.len() as u32).map(work).collect(),
            names: vec![String::new(), "layers.0".into()],
            items: items.iter().map(|&(lane, what)| Item { lane, what }).collect(),
            repeats: 1,
        };
        (tape, secs.to_vec(), vec![Class::Compute; secs.len()])
    }

    fn work(work: u32) -> What {
        What::Work { work, tag: 0 }
    }

    fn secs(case: &(Tape, Vec<f64>, Vec<Class>), sharing: Sharing) -> f64 {
        play(&case.0, &Speeds { secs: &case.1, class: &case.2, sharing }, None).unwrap().secs
    }

    #[test]
    fn streams_run_together_until_an_event_joins_them() {
        let rec = What::Record { event: 0 };
        let end = [(0, What::Record { event: 1 }), (0, What::HostWait { record: 4 })];
        // comm 3 s; compute 1 s, waits for comm, 2 s.
        let mut items = vec![(1, work(2)), (1, rec), (0, work(0)), (0, work(1))];
        items.extend(end);
        assert_eq!(secs(&tape(&[1.0, 2.0, 3.0], &items), ALONE), 3.0, "the host waits for compute alone; comm is under it");
        let mut items = vec![(1, work(2)), (1, rec), (0, work(0)), (0, What::Wait { record: 1 }), (0, work(1))];
        items.extend([(0, What::Record { event: 1 }), (0, What::HostWait { record: 5 })]);
        let case = tape(&[1.0, 2.0, 3.0], &items);
        let played = play(&case.0, &Speeds { secs: &case.1, class: &case.2, sharing: ALONE }, None).unwrap();
        assert_eq!(played.secs, 5.0);
        assert_eq!((played.busy[0], played.busy[1]), (3.0, 3.0));
        assert_eq!(played.exposed, [Exposed { lane: 1, tag: 0, secs: 2.0 }]);
    }

    #[test]
    fn what_the_step_before_left_is_waited_for() {
        // comm starts 4 s of work at the end of a step; the next step's compute waits for it after 1 s of its own.
        let items = [
            (0, work(0)),
            (0, What::WaitBefore { record: 6 }),
            (0, work(1)),
            (0, What::Record { event: 1 }),
            (1, What::Wait { record: 3 }),
            (1, work(2)),
            (1, What::Record { event: 0 }),
            (0, What::HostWait { record: 3 }),
        ];
        assert_eq!(secs(&tape(&[1.0, 2.0, 4.0], &items), ALONE), 6.0);
        assert_eq!(secs(&tape(&[1.0, 2.0, 0.5], &items), ALONE), 3.0);
    }

    #[test]
    fn running_together_costs_what_the_machine_says() {
        let items = [
            (1, work(1)),
            (1, What::Record { event: 0 }),
            (0, work(0)),
            (0, What::Wait { record: 1 }),
            (0, work(2)),
            (0, What::Record { event: 1 }),
            (0, What::HostWait { record: 5 }),
        ];
        let mut case = tape(&[2.0, 2.0, 1.0], &items);
        case.2[1] = Class::Collective;
        assert_eq!(secs(&case, Sharing::Cores(1.0)), 5.0, "two streams on one core take turns");
        assert!((secs(&case, Sharing::Cores(2.0)) - 4.0).abs() < 1e-9, "three threads on two cores");
        assert!((secs(&case, Sharing::Factors { compute: 1.25, collective: 1.25 }) - 3.5).abs() < 1e-9);
    }

    #[test]
    fn what_repeats_is_played_once_and_counted_often() {
        let mark = |mark| (0, What::Mark { mark });
        let end = [(0, What::Record { event: 0 }), (0, What::HostWait { record: 5 })];
        let mut items = vec![(0, work(0)), mark(0), (0, work(1)), mark(1), (0, work(2))];
        items.extend(end);
        let mut case = tape(&[1.0, 2.0, 4.0], &items);
        case.0.repeats = 10;
        let played = play(&case.0, &Speeds { secs: &case.1, class: &case.2, sharing: ALONE }, None).unwrap();
        assert_eq!((played.secs, played.busy[0]), (25.0, 25.0));
    }

    #[test]
    fn a_wait_for_what_is_not_recorded_yet_returns_at_once() {
        let items =
            [(1, What::Wait { record: 4 }), (1, work(0)), (1, What::Record { event: 0 }), (0, work(0)), (0, What::Record { event: 1 })];
        let case = tape(&[1.0], &items);
        // No program can enqueue this: a wait refers to what was recorded before it.
        assert!(play(&case.0, &Speeds { secs: &case.1, class: &case.2, sharing: ALONE }, None).is_ok());
    }
}
