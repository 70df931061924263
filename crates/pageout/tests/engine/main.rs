//! The engine on the simulated kernel, against a model program that checks every byte. One executable: most of what each
//! part is built of is the engine, made for that kernel.
#![cfg(not(any(loom, shuttle)))]

#[path = "../engine_support/mod.rs"]
mod engine_support;

mod heirs;
mod rows;
mod schedules;
mod seeds;
mod switch;
mod thrift;
