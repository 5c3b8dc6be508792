package main

import (
	"bufio"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"agentfly.dev/sandboxd/pod"
	"agentfly.dev/sandboxd/pristine"
)

var (
	ownProcesses = pod.Kind{Method: pod.Overlay, OwnUsers: true, OwnProcesses: true}
	mounts       = pod.Kind{Method: pod.Overlay, OwnProcesses: true}
	sharedPID    = pod.Kind{Method: pod.OverlaySharedPID, OwnUsers: true}
)

func findings(works ...pod.Kind) (all []pod.Finding) {
	for _, kind := range []pod.Kind{ownProcesses, mounts, sharedPID} {
		found := pod.Finding{Kind: kind, Why: "no"}
		for _, one := range works {
			if one == kind {
				found.Works, found.Why = true, ""
			}
		}
		all = append(all, found)
	}
	return append(all, pod.Finding{Kind: pod.Kind{Method: "paths"}, Works: true})
}

func TestFirstKindThatWorksIsChosen(t *testing.T) {
	for name, c := range map[string]struct {
		wanted  *pristine.Reset
		works   []pod.Kind
		want    pod.Kind
		refused map[string]string
	}{
		"all":           {nil, []pod.Kind{ownProcesses, mounts, sharedPID}, ownProcesses, map[string]string{}},
		"the second":    {nil, []pod.Kind{mounts, sharedPID}, mounts, map[string]string{}},
		"the third":     {&pristine.Reset{Method: "auto"}, []pod.Kind{sharedPID}, sharedPID, map[string]string{"overlay": "no; no"}},
		"none":          {nil, nil, pod.Kind{}, map[string]string{"overlay": "no; no", "overlay-shared-pid": "no"}},
		"by name":       {&pristine.Reset{Method: "overlay-shared-pid"}, []pod.Kind{ownProcesses, sharedPID}, sharedPID, map[string]string{}},
		"another one":   {&pristine.Reset{Method: "paths"}, []pod.Kind{ownProcesses, mounts, sharedPID}, pod.Kind{}, map[string]string{}},
		"auto, with it": {&pristine.Reset{Paths: []string{"/a"}}, []pod.Kind{ownProcesses, sharedPID}, ownProcesses, map[string]string{}},
	} {
		kind, refused, err := choose(c.wanted, findings(c.works...))
		if err != nil || kind != c.want || !maps.Equal(refused, c.refused) {
			t.Errorf("%s: %+v %v %v", name, kind, refused, err)
		}
	}
	_, _, err := choose(&pristine.Reset{Method: "overlay"}, findings(sharedPID))
	if err == nil || err.Error() != "reset.method: overlay does not work here: no; no" {
		t.Error(err)
	}
}

func TestCommandsHaveTheEnvironmentOfTheImageOnly(t *testing.T) {
	got := imageEnv([]string{"PATH=/bin", "A=b=c", configEnv + "={}", "KUBERNETES_SERVICE_HOST=10.0.0.1", "EMPTY="})
	if !maps.Equal(got, map[string]string{"PATH": "/bin", "A": "b=c", "EMPTY": ""}) {
		t.Error(got)
	}
}

func TestInstallCopiesTheProgramWholeAndExecutable(t *testing.T) {
	folder := t.TempDir()
	for range 2 { // again, over a program that runs perhaps
		if err := install([]string{folder}); err != nil {
			t.Fatal(err)
		}
	}
	entries, err := os.ReadDir(folder)
	if err != nil || len(entries) != 1 || entries[0].Name() != "sandboxd" {
		t.Fatal(entries, err)
	}
	made, _ := os.Stat(filepath.Join(folder, "sandboxd"))
	own, _ := os.Stat("/proc/self/exe")
	if made.Size() != own.Size() || made.Mode().Perm() != programMode {
		t.Error(made.Size(), made.Mode())
	}
	if err := install([]string{folder + "/none"}); err == nil || !strings.HasPrefix(err.Error(), "install: ") {
		t.Error(err)
	}
	if err := install(nil); err == nil {
		t.Error("no folder is no error")
	}
	if err := install([]string{folder, "soon"}); err == nil {
		t.Error("no time is no error")
	}
}

func TestConfigurationHasOneWayForTheOwner(t *testing.T) {
	key := `"adminKey":"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="`
	for line, want := range map[string]string{
		`{}`:                              "config: adminToken is empty, and so is adminKey",
		`{"adminToken":"a",` + key + `}`:  "config: adminToken and adminKey are both given",
		`{` + key + `}`:                   `config: member: "" is empty`,
		`{"adminKey":"x","member":"m"}`:   "config: adminKey: ",
		`{"adminToken":"a","unknown":1}`:  "config: json: unknown field",
		`{"adminToken":"a"}`:              "",
		`{` + key + `,"member":"pool-1"}`: "",
	} {
		cfg, err := readConfig(bufio.NewReader(strings.NewReader(line + "\n")))
		if (err == nil) != (want == "") || (err != nil && !strings.HasPrefix(err.Error(), want)) {
			t.Errorf("%s: %v, want %s", line, err, want)
		}
		if err == nil && (cfg.Boot != "") != (cfg.AdminKey != "") {
			t.Errorf("%s: boot %q", line, cfg.Boot)
		}
	}
}
