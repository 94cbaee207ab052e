//! Memory of this process's devices: the backend that moves it, which an engine is given at its start.
//!
//! The engine does not know the vendor. It is given a way to make the backend, registers mappings of that kind, and moves them
//! by [`Via::Cuda`](super::Via) within itself; between such memory and peers it stages through buffers that the backend locks.
//! Unproven until run on a device: what stands in for one is a fake driver (`verify/fake-cuda`) and a backend that plays it.

use std::fmt;
use std::io;
use std::sync::Arc;

use millpond_hal::contract::Device;

/// How the backend for memory of this process's GPUs is made; see [`Options::gpus`](super::Options).
///
/// ```
/// use millpond_node::engine::Gpus;
/// // With `millpond_hal`'s feature `cuda`: Gpus::new(move || Ok(Box::new(CudaDevice::new(&cuda)?)))
/// let none = Gpus::new(|| Err(std::io::Error::other("there is no GPU")));
/// assert_eq!(format!("{none:?}"), "Gpus");
/// ```
#[derive(Clone)]
pub struct Gpus(Arc<Make>);

type Make = dyn Fn() -> io::Result<Box<dyn Device>> + Send + Sync;

impl Gpus {
    /// `make` is called once for each engine.
    pub fn new(make: impl Fn() -> io::Result<Box<dyn Device>> + Send + Sync + 'static) -> Self {
        Self(Arc::new(make))
    }

    pub(super) fn device(&self) -> io::Result<Box<dyn Device>> {
        (self.0)()
    }
}

impl fmt::Debug for Gpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Gpus")
    }
}
