//! Tasks over threads, without a say in their results.

use std::sync::Mutex;
use std::thread;

/// Runs `work` on every task, on up to `threads` threads (this one included), each with a state of
/// its own.
pub(crate) fn each<T: Send, S>(
    threads: usize,
    tasks: Vec<T>,
    state: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, T) + Sync,
) {
    let threads = threads.clamp(1, tasks.len().max(1));
    let queue = Mutex::new(tasks.into_iter());
    let run = || {
        let mut state = state();
        loop {
            // A poisoned queue means that another thread panicked; the scope passes that on.
            let task = match queue.lock() {
                Ok(mut queue) => queue.next(),
                Err(_) => None,
            };
            match task {
                Some(task) => work(&mut state, task),
                None => break,
            }
        }
    };
    thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(run);
        }
        run();
    });
}

/// The threads to use when the caller does not say.
pub(crate) fn available() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}
