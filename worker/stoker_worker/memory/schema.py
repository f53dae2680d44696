"""The tables of a store's database. Pure SQL.

``docs/storage-format.md`` explains every column, and "Formats" there what a change of the tables needs.
"""

from typing import Final

FORMAT: Final = 8
"""SQLite's `user_version`. No release wrote a lower one."""

APPLICATION_ID: Final = 0x53544F4B
"""``STOK``: SQLite's `application_id`, by which `file` and we know the database as a store's."""

TABLES: Final = """
CREATE TABLE store (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    commits INTEGER NOT NULL,
    cache_bytes INTEGER NOT NULL,
    tables BLOB NOT NULL,
    shared TEXT,
    clock_s REAL NOT NULL DEFAULT 0
);
INSERT INTO store VALUES (1, 0, 0, x'', NULL, 0);

CREATE TABLE agents (
    number INTEGER PRIMARY KEY,
    agent_id TEXT NOT NULL UNIQUE,
    key BLOB NOT NULL,
    version INTEGER NOT NULL,
    head BLOB NOT NULL,
    unsaved INTEGER NOT NULL,
    checksum BLOB NOT NULL,
    turns INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL,
    transcript_bytes INTEGER NOT NULL,
    piece_bytes INTEGER NOT NULL,
    last_block BLOB,
    evicted INTEGER NOT NULL,
    last_used REAL NOT NULL,
    used_clock_s REAL NOT NULL DEFAULT 0
);
CREATE UNIQUE INDEX agents_by_key ON agents (key);
CREATE INDEX agents_by_use ON agents (last_used);
CREATE INDEX agents_by_clock ON agents (used_clock_s);
CREATE INDEX agents_with_cache ON agents (last_used) WHERE piece_bytes > 0 OR last_block IS NOT NULL;
CREATE INDEX agents_by_block ON agents (last_block) WHERE last_block IS NOT NULL;

CREATE TABLE turns (
    agent INTEGER NOT NULL,
    version INTEGER NOT NULL,
    parent BLOB,
    delivery BLOB,
    about TEXT NOT NULL,
    keep_tokens INTEGER NOT NULL,
    keep_messages INTEGER NOT NULL,
    keep_text INTEGER NOT NULL,
    new_tokens BLOB NOT NULL,
    new_messages TEXT,
    new_text TEXT,
    checksum BLOB NOT NULL,
    PRIMARY KEY (agent, version)
);

CREATE TABLE deliveries (
    agent INTEGER NOT NULL,
    key BLOB NOT NULL,
    result TEXT NOT NULL,
    expires REAL NOT NULL,
    checksum BLOB NOT NULL,
    PRIMARY KEY (agent, key)
) WITHOUT ROWID;
CREATE INDEX deliveries_by_expiry ON deliveries (expires);

CREATE TABLE blocks (
    address BLOB PRIMARY KEY,
    parent BLOB NOT NULL,
    model TEXT NOT NULL,
    n_bytes INTEGER NOT NULL,
    chain_bytes INTEGER NOT NULL,
    unused_since REAL
) WITHOUT ROWID;
CREATE INDEX blocks_by_parent ON blocks (parent);
CREATE INDEX blocks_unused ON blocks (unused_since) WHERE unused_since IS NOT NULL;

CREATE TABLE models (
    fingerprint TEXT PRIMARY KEY,
    cache TEXT NOT NULL
) WITHOUT ROWID;
"""
