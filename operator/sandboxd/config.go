package main

import (
	"bufio"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"agentfly.dev/sandboxd/admin"
	"agentfly.dev/sandboxd/pristine"
)

// config is the one line of JSON that the owner writes to standard input, or into a pod's environment.
type config struct {
	AdminToken  string            `json:"adminToken"`  // of the owner; or instead
	AdminKey    string            `json:"adminKey"`    // the key that the owner signs with, and
	Member      string            `json:"member"`      // what it calls this sandbox
	Scratch     []string          `json:"scratch"`     // folders emptied at reset
	Upper       string            `json:"upper"`       // where writes to the root go, "" when it is read-only
	UpperBytes  int64             `json:"upperBytes"`  // in a pod: what commands may write; 0 for a share of the memory
	Workdir     string            `json:"workdir"`     // where commands start
	OwnNetwork  bool              `json:"ownNetwork"`  // the sandbox shares its network with nobody
	Env         map[string]string `json:"env"`         // of every command
	Incarnation int               `json:"incarnation"` // the first one of this process
	Limits      limits            `json:"limits"`      // where no cgroup sets them
	Reset       *pristine.Reset   `json:"reset"`       // nil where only the upper and scratch can be written

	FileLimitBytes int64 `json:"fileLimitBytes"` // of one file on its way in or out; 0 for maxFileBytes

	Boot string `json:"boot"` // drawn here
	Pod  *facts `json:"pod"`  // from the keeper in a pod
}

// facts are what the first process of a pod found out there.
type facts struct {
	Method  string            `json:"method"`
	Refused map[string]string `json:"refused"` // method -> why it does not work here
}

func readConfig(stdin *bufio.Reader) (config, error) {
	line, err := stdin.ReadSlice('\n')
	if err != nil {
		return config{}, fmt.Errorf("config: no line of at most %d bytes on standard input: %w", maxConfigBytes, err)
	}
	defer clear(line) // the token must not stay in a buffer
	return parseConfig(string(line))
}

func parseConfig(line string) (cfg config, err error) {
	decoder := json.NewDecoder(strings.NewReader(line))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&cfg); err != nil {
		return config{}, fmt.Errorf("config: %w", err)
	}
	if cfg.AdminToken == "" && cfg.AdminKey == "" {
		return config{}, errors.New("config: adminToken is empty, and so is adminKey: give one of them")
	}
	if cfg.AdminToken != "" && cfg.AdminKey != "" {
		return config{}, errors.New("config: adminToken and adminKey are both given: leave one of them out")
	}
	if cfg.AdminKey != "" && cfg.Boot == "" {
		var drawn [16]byte
		_, _ = rand.Read(drawn[:])
		cfg.Boot = hex.EncodeToString(drawn[:])
	}
	_, err = cfg.door()
	return cfg, err
}

// door is what the owner comes in by.
func (c config) door() (*admin.Door, error) {
	if c.AdminKey == "" {
		return admin.ByToken(c.AdminToken), nil
	}
	door, err := admin.ByKey(c.AdminKey, c.Member, c.Boot)
	if err != nil {
		return nil, fmt.Errorf("config: %w", err)
	}
	return door, nil
}
