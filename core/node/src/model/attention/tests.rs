//! Attention beside its definition, a number at a time, and beside exact arithmetic.

use super::super::kernel::exp2;
use super::*;

const GROUP: usize = 3;

fn value(seed: usize) -> f32 {
    ((seed * 2_654_435_761) % 1000) as f32 / 250.0 - 2.0
}

/// Heads of so many elements.
#[derive(Clone, Copy)]
struct Head(usize);

impl Head {
    fn row(self, side: Side, token: usize) -> Vec<f32> {
        let seed = if side == Side::Key { 11 } else { 7_000_003 };
        (0..self.0).map(|element| value(seed + token * 977 + element)).collect()
    }

    fn queries(self, tokens: std::ops::Range<usize>) -> Vec<f32> {
        (tokens.start * GROUP * self.0..tokens.end * GROUP * self.0).map(|place| value(place + 3) / 4.0).collect()
    }

    fn attend(self, tokens: std::ops::Range<usize>, workers: &Workers) -> Vec<f32> {
        let queries = self.queries(tokens.clone());
        let mut out = vec![f32::NAN; queries.len()];
        let job = Attention { queries: &queries, head_dim: self.0, group: GROUP, start: tokens.start };
        job.run(workers, &self, &mut out);
        // The same by one chain after the other, the last first.
        let (mut states, mut parts) = (vec![[f32::NAN; LANES]; CHAINS * job.states_len()], vec![f32::NAN; out.len()]);
        for (chain, states) in states.chunks_exact_mut(job.states_len()).enumerate().rev() {
            job.chains(workers, &self, chain..chain + 1, states);
        }
        job.merge(workers, &mut states, &mut parts);
        assert_eq!(bits(&out), bits(&parts));
        out
    }

    /// One row, as the module's documentation has it, a number at a time.
    fn plain(self, query: &[f32], sees: usize) -> Vec<f32> {
        let keys: Vec<_> = (0..sees).map(|token| self.row(Side::Key, token)).collect();
        let values: Vec<_> = (0..sees).map(|token| self.row(Side::Value, token)).collect();
        let (query, query_scale) = integers(query, LARGE);
        let score = |key: &Vec<f32>| {
            let (key, scale) = integers(key, SMALL);
            let chunks = query.chunks(TERMS).zip(key.chunks(TERMS));
            chunks.fold(0f32, |sum, (query, key)| sum + dot(query, key) as f32) * (query_scale * scale)
        };
        let chain = |chain: usize| {
            let (mut sums, mut total, mut most) = (vec![0f32; self.0], 0f32, f32::MIN);
            for (keys, values) in keys.chunks(SPAN).zip(values.chunks(SPAN)).skip(chain).step_by(CHAINS) {
                let mut weights: Vec<f32> = keys.iter().map(score).collect();
                let before = most;
                most = weights.iter().copied().fold(most, f32::max);
                let factor = exp2(before - most);
                weights.iter_mut().for_each(|weight| *weight = exp2(*weight - most));
                total = weights.iter().fold(total * factor, |sum, weight| sum + weight);
                for (element, sum) in sums.iter_mut().enumerate() {
                    let column: Vec<f32> = values.iter().map(|row| row[element]).collect();
                    *sum *= factor;
                    if weights.len() < SPAN {
                        let terms = weights.iter().zip(column);
                        *sum = terms.fold(*sum, |sum, (weight, value)| value.mul_add(*weight, sum));
                    } else {
                        let ((weights, worth), (column, scale)) = (integers(&weights, LARGE), integers(&column, SMALL));
                        *sum = (dot(&weights, &column) as f32).mul_add(worth * scale, *sum);
                    }
                }
            }
            (sums, total, most)
        };
        let merge = |(mut sums, total, most): (Vec<f32>, f32, f32), (others, other_total, other_most)| {
            let largest = most.max(other_most);
            let (factor, other_factor) = (exp2(most - largest), exp2(other_most - largest));
            let merge = |mine: f32, other: f32| other.mul_add(other_factor, mine * factor);
            sums.iter_mut().zip::<Vec<f32>>(others).for_each(|(sum, other)| *sum = merge(*sum, other));
            (sums, merge(total, other_total), largest)
        };
        let (sums, total, _) = (0..CHAINS).map(chain).reduce(merge).expect("there are chains");
        sums.iter().map(|sum| sum * (1.0 / total)).collect()
    }

    /// One row without any rounding worth the name.
    fn exact(self, query: &[f32], sees: usize) -> Vec<f64> {
        let score = |token| {
            let key = self.row(Side::Key, token);
            key.iter().zip(query).map(|(key, query)| f64::from(*key) * f64::from(*query)).sum::<f64>()
        };
        let scores: Vec<f64> = (0..sees).map(score).collect();
        let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - most).exp2()).collect();
        let total: f64 = weights.iter().sum();
        let mut sums = vec![0f64; self.0];
        for (token, weight) in weights.iter().enumerate() {
            let row = self.row(Side::Value, token);
            sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += f64::from(value) * weight / total);
        }
        sums
    }
}

impl ReadRows for Head {
    fn read(&self, side: Side, first: usize, rows: &mut [f32]) {
        for (token, out) in (first..).zip(rows.chunks_exact_mut(self.0)) {
            out.copy_from_slice(&self.row(side, token));
        }
    }
}

fn integers(values: &[f32], bound: f32) -> (Vec<i32>, f32) {
    let most = values.iter().fold(0f32, |most, value| most.max(value.abs()));
    let nearest = |value: &f32| (value * (bound / most) + ROUND) - ROUND;
    #[allow(clippy::cast_possible_truncation, reason = "whole and small")]
    (values.iter().map(|value| nearest(value) as i32).collect(), most / bound)
}

fn dot(a: &[i32], b: &[i32]) -> i32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn each_row_equals_the_plain_chain_however_rows_are_cut() {
    let workers = Workers::new(1);
    for head in [Head(16), Head(64), Head(96)] {
        let (all, len) = (head.attend(0..150, &workers), head.0);
        for (index, (query, out)) in head.queries(0..150).chunks(len).zip(all.chunks(len)).enumerate() {
            assert_eq!(bits(out), bits(&head.plain(query, index / GROUP + 1)), "row {index}");
        }
        for cuts in [vec![0, 1, 2, 3, 70, 150], vec![0, 16, 62, 64, 65, 129], vec![0, 5, 17, 61, 69, 127, 128, 150]] {
            for cut in cuts.windows(2) {
                let part = &all[cut[0] * GROUP * len..cut[1] * GROUP * len];
                assert_eq!(bits(&head.attend(cut[0]..cut[1], &workers)), bits(part), "{cut:?}");
            }
        }
    }
}

#[test]
fn every_kind_of_vector_gives_the_same_bits() {
    let mut workers = Workers::new(1);
    let wide = Head(64).attend(0..140, &workers);
    #[allow(unused_mut, reason = "some machines have no others")]
    let mut others = vec![pulp::Arch::Scalar];
    #[cfg(target_arch = "x86_64")]
    others.extend(pulp::x86::V3::try_new().map(pulp::Arch::V3));
    for arch in others {
        workers.arch = arch;
        assert_eq!(bits(&wide), bits(&Head(64).attend(0..140, &workers)), "{arch:?}");
    }
}

#[test]
fn rounding_costs_little_beside_exact_attention() {
    let head = Head(64);
    let all = head.attend(0..400, &Workers::new(1));
    let rows = head.queries(0..400);
    for (index, (query, out)) in rows.chunks(64).zip(all.chunks(64)).enumerate().step_by(37) {
        for (ours, exact) in out.iter().zip(head.exact(query, index / GROUP + 1)) {
            assert!((f64::from(*ours) - exact).abs() < 1e-3, "row {index}: {ours} {exact}");
        }
    }
}

#[test]
fn the_largest_sums_fit() {
    assert!(TERMS as f64 * f64::from(LARGE) * f64::from(SMALL) < f64::from(i32::MAX));
    struct Large;
    impl ReadRows for Large {
        fn read(&self, side: Side, _: usize, rows: &mut [f32]) {
            rows.fill(if side == Side::Key { 3.0 } else { 2.0 });
        }
    }
    let queries = vec![0.5; GROUP * 64];
    let mut out = vec![0.0; GROUP * 64];
    let job = Attention { queries: &queries, head_dim: 64, group: GROUP, start: 127 };
    job.run(&Workers::new(1), &Large, &mut out);
    assert!(out.iter().all(|value| (value - 2.0).abs() < 1e-5), "{out:?}");
}
