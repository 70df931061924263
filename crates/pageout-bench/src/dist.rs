//! Random numbers and the distributions that accesses follow.

use std::str::FromStr;

use crate::pattern::mix;

/// A small generator (SplitMix64): one addition and a mix a number.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// A stream of its own for each seed.
    pub fn new(seed: u64) -> Rng {
        Rng(mix(seed ^ 0x6a09_e667_f3bc_c909))
    }

    /// The next 64 bits.
    #[inline]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Uniform in `0..n`.
    #[inline]
    pub fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(n)) >> 64) as u64
    }

    /// Uniform in 0..1.
    #[inline]
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Puts `items` in random order.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last as u64 + 1) as usize);
        }
    }
}

/// How accesses spread over the pages.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Spread {
    /// Every page alike.
    Uniform,
    /// A bell around the middle, its standard deviation an eighth of the whole (as pmbench's default shape).
    Normal,
    /// Zipf with this exponent, the popular pages scattered over the whole.
    Zipf(f64),
}

impl FromStr for Spread {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "uniform" => Ok(Spread::Uniform),
            None if text == "normal" => Ok(Spread::Normal),
            None if text == "zipf" => Ok(Spread::Zipf(0.99)),
            Some(("zipf", theta)) => match theta.parse() {
                Ok(theta) if 0.0 < theta && theta < 1.0 => Ok(Spread::Zipf(theta)),
                _ => Err(format!("{theta}: the exponent of zipf lies between 0 and 1")),
            },
            _ => Err(format!("{text}: not a distribution; it is uniform, normal, zipf or zipf:EXPONENT")),
        }
    }
}

/// Draws indices in `0..n`.
#[derive(Clone, Debug)]
pub struct Sampler {
    n: u64,
    kind: Kind,
}

#[derive(Clone, Debug)]
enum Kind {
    Uniform,
    Normal,
    Zipf { theta: f64, alpha: f64, zeta: f64, eta: f64, stride: u64 },
}

impl Sampler {
    /// For `n` > 0 items. Zipf takes time in proportion to `n` to set up.
    pub fn new(spread: Spread, n: u64) -> Sampler {
        assert!(n > 0, "something to draw from");
        let kind = match spread {
            Spread::Uniform => Kind::Uniform,
            Spread::Normal => Kind::Normal,
            Spread::Zipf(theta) => {
                // Gray et al., "Quickly generating billion-record synthetic databases" (1994).
                let zeta: f64 = (1..=n).map(|i| (i as f64).powf(-theta)).sum();
                let zeta2 = 1.0 + 0.5f64.powf(theta);
                let eta = (1.0 - (2.0 / n as f64).powf(1.0 - theta)) / (1.0 - zeta2 / zeta);
                Kind::Zipf { theta, alpha: 1.0 / (1.0 - theta), zeta, eta, stride: coprime_stride(n) }
            }
        };
        Sampler { n, kind }
    }

    /// The next index.
    #[inline]
    pub fn draw(&self, rng: &mut Rng) -> u64 {
        match self.kind {
            Kind::Uniform => rng.below(self.n),
            Kind::Normal => loop {
                // Box and Muller; what falls outside is drawn again.
                let radius = (-2.0 * (1.0 - rng.unit()).ln()).sqrt();
                let z = radius * (std::f64::consts::TAU * rng.unit()).cos();
                let at = (0.5 + z / 8.0) * self.n as f64;
                if (0.0..self.n as f64).contains(&at) {
                    return at as u64;
                }
            },
            Kind::Zipf { theta, alpha, zeta, eta, stride } => {
                let u = rng.unit();
                let uz = u * zeta;
                let rank = if uz < 1.0 {
                    0
                } else if uz < 1.0 + 0.5f64.powf(theta) {
                    1
                } else {
                    (self.n as f64 * (eta * u - eta + 1.0).powf(alpha)) as u64
                };
                let rank = rank.min(self.n - 1);
                (u128::from(rank) * u128::from(stride) % u128::from(self.n)) as u64
            }
        }
    }
}

/// A number that shares no divisor with `n`: multiplying by it modulo `n` visits every index once.
fn coprime_stride(n: u64) -> u64 {
    let divides = |mut a: u64, mut b: u64| {
        while b != 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    (0..).map(|i| (n as f64 * 0.618) as u64 + i).find(|&s| s > 0 && divides(s, n) == 1).expect("1 is one")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(spread: Spread, n: u64) -> Vec<u32> {
        let (sampler, mut rng) = (Sampler::new(spread, n), Rng::new(1));
        let mut counts = vec![0; n as usize];
        for _ in 0..200_000 {
            counts[sampler.draw(&mut rng) as usize] += 1;
        }
        counts
    }

    #[test]
    fn shapes() {
        assert!(counts(Spread::Uniform, 100).iter().all(|&c| (1700..2300).contains(&c)));
        let normal = counts(Spread::Normal, 101);
        assert!(normal[50] > 20 * normal[10].max(1));
        let mut zipf = counts(Spread::Zipf(0.99), 1000);
        assert!(zipf.iter().filter(|&&c| c > 0).count() > 990, "every index can be drawn");
        zipf.sort_unstable_by(|a, b| b.cmp(a));
        let ratio = f64::from(zipf[0]) / f64::from(zipf[9]);
        assert!((7.0..13.0).contains(&ratio), "rank 1 against rank 10 is about 10: {ratio}");
    }

    #[test]
    fn one_item_is_drawn() {
        for spread in [Spread::Uniform, Spread::Normal, Spread::Zipf(0.5)] {
            assert_eq!(Sampler::new(spread, 1).draw(&mut Rng::new(3)), 0);
        }
    }
}
