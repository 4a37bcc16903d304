//! A queue of numbered jobs shared by a few threads.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;

use super::error::Error;

/// Runs jobs 0 to `count` on `threads` threads and hands each result to `done` on this thread, in the
/// order in which they finish. The first error stops the queue and is returned.
pub(super) fn run<T: Send>(
    threads: usize,
    count: usize,
    job: impl Fn(usize) -> Result<T, Error> + Sync,
    mut done: impl FnMut(usize, T) -> Result<(), Error>,
) -> Result<(), Error> {
    let next = AtomicUsize::new(0);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (sender, receiver) = mpsc::channel();
        for _ in 0..threads.clamp(1, count.max(1)) {
            let (sender, job, next, stop) = (sender.clone(), &job, &next, &stop);
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    if index >= count || sender.send((index, job(index))).is_err() {
                        break;
                    }
                }
            });
        }
        drop(sender);
        for (index, result) in receiver {
            if let Err(error) = result.and_then(|value| done(index, value)) {
                stop.store(true, Ordering::Relaxed);
                return Err(error);
            }
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_job_is_done_once() {
        let mut seen = vec![0; 50];
        run(
            3,
            50,
            |index| Ok(index * 2),
            |index, double| {
                assert_eq!(double, index * 2);
                seen[index] += 1;
                Ok(())
            },
        )
        .unwrap();
        assert_eq!(seen, vec![1; 50]);
        run(3, 0, |_| Ok(()), |_, ()| Ok(())).unwrap();
    }

    #[test]
    fn an_error_stops_the_queue() {
        let started = AtomicUsize::new(0);
        let job = |index| {
            started.fetch_add(1, Ordering::Relaxed);
            if index == 3 {
                Err(Error::Cancelled)
            } else {
                Ok(())
            }
        };
        let result = run(1, 10_000_000, job, |_, ()| Ok(()));
        assert!(matches!(result, Err(Error::Cancelled)));
        assert!(started.load(Ordering::Relaxed) < 10_000_000);
    }
}
