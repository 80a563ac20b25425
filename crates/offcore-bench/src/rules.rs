//! What a measured worker does with packets, changed between windows.

use std::any::Any;

use anyhow::{Context, Result};
use offcore_flow::forwarding::{Forwarding, Rules};
use offcore_flow::guest_pair::GuestPair;
use offcore_flow::task::Task;
use offcore_flow::worker::Worker;

/// The rules of a worker that forwards, and does nothing else.
///
/// # Errors
/// When it does something else.
pub(crate) fn rules(worker: &mut Worker) -> Result<&mut Rules> {
    let task: &mut dyn Task = worker.tasks.first_mut().context("the worker has no task")?.as_mut();
    let task: &mut dyn Any = task;
    if task.is::<GuestPair>() {
        return task.downcast_mut::<GuestPair>().map(GuestPair::rules).context("the task is a pair");
    }
    task.downcast_mut::<Forwarding>().map(Forwarding::rules).context("the worker's task does not forward")
}
