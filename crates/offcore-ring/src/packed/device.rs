//! The device side of a packed virtqueue.
use super::Layout;
use crate::RingError;
use crate::device::{Buffer, Chain, DeviceQueue, Direction};
use offcore_mem::GuestMemory;
/// The device side of one queue.
#[derive(Debug)]
pub enum Queue {}
impl Queue {
    /// Not yet.
    ///
    /// # Errors
    /// Always.
    pub fn new(layout: Layout, _base: u32, _event_idx: bool, _indirect: bool) -> Result<Self, RingError> {
        Err(RingError::Size(layout.size().into()))
    }
}
impl DeviceQueue for Queue {
    fn size(&self) -> u16 {
        match *self {}
    }
    fn base(&self) -> u32 {
        match *self {}
    }
    fn look(&mut self, _: usize) -> Result<usize, RingError> {
        match *self {}
    }
    fn has(&mut self, _: u16) -> Result<bool, RingError> {
        match *self {}
    }
    fn single(
        &mut self,
        _: u16,
        _: &GuestMemory,
        _: Direction,
    ) -> Result<Option<(Buffer, Chain)>, RingError> {
        match *self {}
    }
    fn walk(
        &mut self,
        _: u16,
        _: &GuestMemory,
        _: Direction,
        _: usize,
        _: impl FnMut(Buffer),
    ) -> Result<Chain, RingError> {
        match *self {}
    }
    fn consume(&mut self, _: u16) {
        match *self {}
    }
    fn push_used(&mut self, _: Chain, _: u32) {
        match *self {}
    }
    fn publish(&mut self) {
        match *self {}
    }
    fn needs_notification(&mut self) -> bool {
        match *self {}
    }
    fn set_notification(&mut self, _: bool) {
        match *self {}
    }
    fn prefetch_used(&self, _: usize) {
        match *self {}
    }
}
