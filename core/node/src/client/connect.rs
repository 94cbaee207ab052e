//! A client of a store that other nodes run.

use crate::directory::Link;
use crate::engine::{AllocateError, Engine};
use crate::node::Node;
use crate::runtime::Runtime;
use crate::session::Target;

use super::{Options, StoreClient};

impl<R: Runtime> StoreClient<R> {
    /// A client at `node`, whose engine is `engine`, of the store whose directory is at `directory`. Opens nothing yet.
    pub fn connect(
        node: &Node<R>,
        engine: Engine<R>,
        directory: Target,
        options: Options,
    ) -> Result<Self, AllocateError> {
        let link = Link::remote(node.client(directory));
        Self::new(engine, link, node.credentials(), None, options)
    }
}
