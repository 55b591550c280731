//! What would a run take on a machine that may not be here?
//!
//! * [`sheet`], [`catalogue`], [`number`]: the hardware catalogue, every number with its origin.
//! * [`rates`]: seconds of one unit of work on a machine.
//! * [`record`]: one step of the trainer on the simulated device, as a tape.
//! * [`mod@predict`]: the tape played at the machine's speed: memory, time, what is exposed, what the answer rests on.
//! * [`answer`]: the form of an answer.
//! * [`deepspeed`]: DeepSpeed's own estimate, for comparison.

pub mod answer;
pub mod catalogue;
pub mod deepspeed;
pub mod number;
pub mod predict;
pub mod rates;
pub mod record;
pub mod sheet;

pub use answer::{Prediction, Range};
pub use catalogue::{Catalogue, Cluster};
pub use number::{Case, How, Number};
pub use predict::{Ask, Predictor, predict};
pub use sheet::{Machine, Part, PartKind, Sheet};
