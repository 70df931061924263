//! A C++ compilation that needs much memory: many instantiations and a large constant expression.

use super::{Invocation, Program, Size};
use anyhow::Result;
use std::path::Path;

/// Instantiated once for each number: a tree, a variant, a function object and their plumbing.
pub(super) const TEMPLATES: &str = r#"
#include <array>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <variant>
#include <vector>

template <int N> struct Tag {
    int value;
    std::array<int, N + 1> more;
    bool operator<(const Tag &other) const { return value < other.value; }
};

template <int N> int use(int seed) {
    std::map<Tag<N>, std::vector<Tag<N + 1>>> table;
    std::variant<Tag<N>, std::string, std::vector<Tag<N>>> choice;
    std::function<int(Tag<N>)> call = [seed](Tag<N> tag) { return tag.value + seed + N; };
    for (int i = 0; i < seed; i++) {
        table[Tag<N>{i, {}}].push_back(Tag<N + 1>{i + 1, {}});
        choice = Tag<N>{i, {}};
    }
    int sum = std::visit([](auto &held) { return int(sizeof held); }, choice);
    for (auto &[key, list] : table) sum += call(key) + int(list.size());
    return sum;
}

template <int... N> int all(int seed, std::integer_sequence<int, N...>) { return (0 + ... + use<N>(seed)); }
int everything(int seed) { return all(seed, std::make_integer_sequence<int, INSTANCES>()); }

constexpr auto squares = [] {
    std::array<unsigned, ENTRIES> out{};
    for (unsigned i = 0; i < ENTRIES; i++) out[i] = i * i ^ (i >> 3);
    return out;
}();
unsigned pick(unsigned i) { return squares[i % ENTRIES]; }
"#;

pub(super) fn programs(size: Size) -> Vec<Program> {
    let (instances, entries) = size.pick((10, 30_000), (120, 600_000));
    let source = move |dir: &Path| -> Result<()> {
        let text =
            TEMPLATES.replace("INSTANCES", &instances.to_string()).replace("ENTRIES", &entries.to_string());
        Ok(std::fs::write(dir.join("much.cc"), text)?)
    };
    let compile = Program::new("c++", |input| {
        Invocation::new("g++")
            .args("-std=c++17 -O1 -fconstexpr-ops-limit=1000000000 -fconstexpr-loop-limit=100000000 -c -o much.o")
            .arg(input.join("much.cc"))
    });
    vec![compile.needs(&["g++"]).input(source).outputs(&["much.o"])]
}
