package pristine

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
)

// networkTables are compared as they are. The tables of TCP and UDP are not among them: for each read of one the kernel
// walks all buckets of the machine, which takes longer than the rest of a reset. It also counts what is in them.
var (
	networkTables = []string{"dev", "unix"}
	networkCounts = []string{"sockstat", "sockstat6"}
)

// ofNamespace are the counts of one network namespace; the others in a line are of the machine.
var ofNamespace = []string{"inuse", "tw"}

// verifyNetwork finds what outlives sockets: closed connections keep their ports for a minute, and the
// kernel remembers peers and counts packets. All of that takes at least one packet.
func (b *Baseline) verifyNetwork() error {
	if b.network == nil {
		return nil
	}
	now, err := readNetwork()
	if err != nil {
		return err
	}
	if !bytes.Equal(now, b.network) {
		return fmt.Errorf("network: the loopback device was used, or a socket is left")
	}
	return nil
}

func readNetwork() ([]byte, error) {
	var all []byte
	for _, name := range slices.Concat(networkTables, networkCounts) {
		content, err := os.ReadFile("/proc/self/net/" + name)
		if err != nil && !errors.Is(err, os.ErrNotExist) { // without IPv6 there are fewer
			return nil, err
		}
		if slices.Contains(networkCounts, name) {
			content = namespaceCounts(content)
		}
		all = append(all, content...)
	}
	return all, nil
}

// namespaceCounts reads lines like "TCP: inuse 2 orphan 0 tw 1 alloc 3 mem 4".
func namespaceCounts(table []byte) (kept []byte) {
	for line := range bytes.Lines(table) {
		words := strings.Fields(string(line))
		for at := 1; at+1 < len(words); at += 2 {
			if slices.Contains(ofNamespace, words[at]) {
				kept = fmt.Appendln(kept, words[0], words[at], words[at+1])
			}
		}
	}
	return kept
}
