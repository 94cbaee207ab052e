//! Operation lists for the data structures and parsers: one list serves proptest, the fuzzer and the corpus.
