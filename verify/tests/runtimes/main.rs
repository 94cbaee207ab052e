//! One suite for every runtime: what `runtime`, `session` and `rpc` promise, seen on each of them and on mixed pairs.

/// Makes a test of each named function, for both runtimes at both ends and for the two mixed pairs.
macro_rules! on_pairs {
    ($($name:ident),* $(,)?) => {
        on_pairs!(@ tokio_to_tokio, millpond_tokio, millpond_tokio, $($name),*);
        on_pairs!(@ smol_to_smol, millpond_smol, millpond_smol, $($name),*);
        on_pairs!(@ tokio_to_smol, millpond_tokio, millpond_smol, $($name),*);
        on_pairs!(@ smol_to_tokio, millpond_smol, millpond_tokio, $($name),*);
    };
    (@ $pair:ident, $a:ident, $b:ident, $($name:ident),*) => {
        mod $pair {
            $(#[test]
            fn $name() {
                $b::run(|b| async move {
                    // The other runtime on a thread of its own, as in another process.
                    let other = b.clone();
                    let near = std::thread::spawn(move || $a::run(|a| super::$name(a, other)).unwrap());
                    millpond_node::runtime::blocking(&b, move || near.join()).await
                })
                .unwrap()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            })*
        }
    };
}

mod node;
#[path = "../../examples/own_runtime/serve.rs"]
mod own_runtime;
mod rpc;
mod runtime;
mod session;
mod tls;
