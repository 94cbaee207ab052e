//! Millpond on smol: the thin adapter that gives `millpond-node` sockets, timers and threads.
