//! `bench bare`: hal's yardstick between two processes.

use std::time::Duration;

use futures::channel::mpsc;
use futures::stream::StreamExt;
use millpond_hal::bare::{self, FOOTPRINT_LEN, Mode, Point};

use super::{Common, Error, Rows, child, size_name};
use crate::runtime::{Runtime, blocking};

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// How the two sides wait: blocking, spin (for at most 20 us) or shm; a list gives a row each.
    #[arg(long, value_delimiter = ',', default_value = "spin")]
    mode: Vec<Mode>,
    #[command(flatten)]
    common: Common,
}

impl Args {
    fn points(&self) -> Result<Vec<Point>, Error> {
        let time = Duration::from_secs_f64(self.common.seconds);
        let mut points = Vec::new();
        for mode in &self.mode {
            for (size, batch) in self.common.shapes() {
                let point = Point { mode: *mode, size, batch, time };
                if point.op_len() > FOOTPRINT_LEN {
                    return Err(too_large(point.op_len()));
                }
                points.push(point);
            }
        }
        Ok(points)
    }
}

/// One operation is larger than the memory that is measured on.
pub(super) fn too_large(op_len: u64) -> Error {
    let (op, all) = (size_name(op_len), size_name(FOOTPRINT_LEN));
    Error::Point {
        what: format!("one operation of {op} is more than the {all} that a measurement uses; lower --size or --batch"),
    }
}

pub(super) async fn run<R: Runtime>(runtime: &R, args: Args, rows: &mut Rows<'_, '_>) -> Result<(), Error> {
    let points = args.points()?;
    let program = child::program("bare")?;
    let (sender, mut taken) = mpsc::unbounded();
    let work = blocking(runtime, move || {
        let command = |address: &str| child::command(&program, &["bare".into(), address.into()]);
        bare::run(&points, command, |row| {
            // Nobody listens any more: the rest is for nobody, too.
            let _ = sender.unbounded_send(row);
        })
    });
    while let Some(row) = taken.next().await {
        rows.write(&row, &[])?;
    }
    Ok(work.await?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mode_gets_every_shape() {
        let common = Common { size: vec![1, 2], batch: vec![1, 8, 16], seconds: 0.5 };
        let args = Args { mode: vec![Mode::Spin, Mode::Shm], common };
        let points = args.points().unwrap();
        assert_eq!(points.len(), 12);
        assert_eq!((points[0].mode, points[11].mode, points[11].op_len()), (Mode::Spin, Mode::Shm, 32));
        assert!(too_large(1 << 30).to_string().contains("1 GiB"));
    }
}
